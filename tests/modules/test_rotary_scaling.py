"""Scaled frequencies, held to transformers' own functions bit for bit and to published numbers."""

import json
import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3 import modeling_phi3

from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from modules.llama import Llama, LlamaConfig
from modules.presets import ModelConfig
from modules.rotary import RotaryConfig, apply_rotary, rotary_tables
from modules.rotary_frequencies import frequencies, frequency_digest
from modules.rotary_scaling import NO_SCALING, ScalingConfig

ORIGINAL = 4096
WIDTHS = (64, 80, 96, 128)
THETAS = (1e4, 5e5, 1e7)


def divisors(width: int, last: float) -> list[float]:
    return [1 + (last - 1) * i / (width // 2 - 1) for i in range(width // 2)]


def settings(width: int) -> dict[str, dict[str, Any]]:
    """Name -> rope_parameters without theta, in Hugging Face's names."""
    original = {"original_max_position_embeddings": ORIGINAL}
    lists = {"short_factor": divisors(width, 1.5), "long_factor": divisors(width, 40.0)}
    yarn = {"rope_type": "yarn", **original}
    return {
        "default": {"rope_type": "default"},
        "linear 4": {"rope_type": "linear", "factor": 4.0},
        "linear 3.7": {"rope_type": "linear", "factor": 3.7},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "dynamic 8": {"rope_type": "dynamic", "factor": 8},
        "yarn": {**yarn, "factor": 16.0},
        "yarn 1": {**yarn, "factor": 1.0},
        "yarn betas": {**yarn, "factor": 8.5, "beta_fast": 16, "beta_slow": 2.5},
        "yarn untruncated": {**yarn, "factor": 4, "truncate": False},
        "yarn mscale": {**yarn, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
        "yarn own factor": {**yarn, "factor": 8.0, "attention_factor": 1.5},
        "llama3 8": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
        "llama3 32": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2, "high_freq_factor": 3.5, **original},
        "longrope": {"rope_type": "longrope", "factor": 32.0, **lists, **original},
        "longrope 1": {"rope_type": "longrope", "factor": 1.0, **lists, **original},
        "longrope own factor": {"rope_type": "longrope", "attention_factor": 1.19, **lists, **original},
    }


NAMES = tuple(settings(64))


def their_config(parameters: dict[str, Any], width: int, theta: float, **more: Any) -> Any:
    return transformers.LlamaConfig(
        hidden_size=2 * width, num_attention_heads=2, head_dim=width, max_position_embeddings=ORIGINAL,
        rope_parameters={**parameters, "rope_theta": theta}, **more,
    )  # fmt: skip


def their_frequencies(config: Any, length: int | None) -> tuple[Tensor, float]:
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("name", NAMES)
def test_frequencies_and_attention_factor_are_those_of_transformers(name: str) -> None:
    """Every bit of them, for widths that are powers of two and others, at lengths around the original one."""
    for width in WIDTHS:
        parameters = settings(width)[name]
        for theta in THETAS:
            scaling, read_theta = ScalingConfig.of_hugging_face(
                {"max_position_embeddings": ORIGINAL, "rope_parameters": {**parameters, "rope_theta": theta}}
            )
            assert read_theta == theta
            for length in (None, 1, ORIGINAL, ORIGINAL + 1, 5000, 131_072):
                expected, factor = their_frequencies(their_config(parameters, width, theta), length)
                got = frequencies(head_width=width, theta=theta, scaling=scaling, length=length)
                assert got.inverse_P.dtype == torch.float32 and torch.equal(got.inverse_P, expected)
                assert got.attention_factor == factor


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_each_head_as_in_transformers(name: str) -> None:
    """Half of 64 dimensions turn, and their frequencies are those of that half."""
    parameters = settings(32)[name] | {"partial_rotary_factor": 0.5}
    config = their_config(parameters, 64, 1e4)
    scaling, theta = ScalingConfig.of_hugging_face(config.to_dict())
    assert scaling.partial_rotary_factor == 0.5 and theta == 1e4
    for length in (None, 10_000):
        got = frequencies(head_width=64, theta=1e4, scaling=scaling, length=length)
        if parameters["rope_type"] == "default":
            expected, factor = modeling_phi3.Phi3RotaryEmbedding.compute_default_rope_parameters(config)
        else:
            expected, factor = their_frequencies(config, length)
        assert torch.equal(got.inverse_P, expected) and got.attention_factor == factor and len(expected) == 16


@pytest.mark.parametrize(
    ("theta", "scaling", "last", "attention_factor"),
    [
        (5e5, {"rope_type": "default"}, 2.455e-6, 1.0),
        (5e5, {"rope_type": "llama3", "factor": 8.0}, 3.069e-7, 1.0),
        (5e5, {"rope_type": "llama3", "factor": 32.0}, 7.672e-8, 1.0),
        (1e4, {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}, 7.217e-6, 1.2773),
    ],
)
def test_published_values(theta: float, scaling: dict[str, Any], last: float, attention_factor: float) -> None:
    if scaling["rope_type"] == "llama3":
        scaling |= {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    got = frequencies(head_width=128, theta=theta, scaling=ScalingConfig(**scaling))
    assert got.inverse_P[0] == 1
    assert got.inverse_P[-1].item() == pytest.approx(last, rel=3e-4)
    assert got.attention_factor == pytest.approx(attention_factor, abs=5e-5)


def test_the_preset_carries_its_checkpoints_scaling() -> None:
    shape = ModelConfig(preset="llama3_2_1b").resolve(258)
    with torch.device("meta"):
        model = Llama(shape, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig())
    # Width 64: 500000^(-62/64) / 32.
    assert model.frequencies().inverse_P[-1].item() == pytest.approx(5e5 ** (-62 / 64) / 32, rel=1e-6)


@given(theta=st.floats(1e3, 1e8), factor=st.floats(1, 64), half=st.integers(2, 64), reached=st.integers(1, 300_000))
def test_ntk_divides_the_last_frequency_by_the_factor_and_keeps_the_first(
    theta: float, factor: float, half: int, reached: int
) -> None:
    plain = frequencies(head_width=2 * half, theta=theta, dtype=torch.float64).inverse_P
    ntk = ScalingConfig(rope_type="ntk", factor=factor)
    got = frequencies(head_width=2 * half, theta=theta, scaling=ntk, dtype=torch.float64).inverse_P
    assert got[0] == 1 and got[-1].item() == pytest.approx(plain[-1].item() / factor, rel=1e-9)
    # Dynamic is ntk by how far the sequence goes beyond the original: factor * reached / original - (factor - 1).
    dynamic = ScalingConfig(rope_type="dynamic", factor=factor, original_max_position_embeddings=2048)
    got = frequencies(head_width=2 * half, theta=theta, scaling=dynamic, length=reached, dtype=torch.float64).inverse_P
    growth = max(factor * reached / 2048 - (factor - 1), 1)
    assert got[-1].item() == pytest.approx(plain[-1].item() / growth, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_what_float32_approximates(name: str) -> None:
    scaling, _ = ScalingConfig.of_hugging_face(
        {"max_position_embeddings": ORIGINAL, "rope_parameters": settings(96)[name]}
    )
    for length in (None, 9000):
        wide = frequencies(head_width=96, theta=5e5, scaling=scaling, length=length, dtype=torch.float64).inverse_P
        low = frequencies(head_width=96, theta=5e5, scaling=scaling, length=length, dtype=torch.bfloat16).inverse_P
        assert (wide.dtype, low.dtype) == (torch.float64, torch.float32)
        torch.testing.assert_close(low.double(), wide, rtol=2e-6, atol=0)
        assert not torch.equal(low.double()[1:], wide[1:])


@pytest.mark.parametrize("name", ["default", "linear 4", "yarn", "yarn mscale", "llama3 8", "longrope", "dynamic"])
@pytest.mark.parametrize("start", [0, 3 * ORIGINAL])
def test_tables_and_logits_are_those_of_transformers(name: str, start: int) -> None:
    """The attention factor included, below the original length and far above it."""
    shape = dict(
        vocabulary_size=97, width=64, layers=2, heads=2, kv_heads=1, head_width=32, hidden_width=80, norm_epsilon=1e-5,
        tied_embeddings=False, rope_theta=1e4, max_positions=ORIGINAL,
    )  # fmt: skip
    parameters = settings(32)[name]
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        their_config(
            parameters, 32, 1e4, vocab_size=97, intermediate_size=80, num_hidden_layers=2, num_key_value_heads=1,
            rms_norm_eps=1e-5, initializer_range=0.15, attn_implementation="eager", tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    scaling, theta = ScalingConfig.of_hugging_face(theirs.config.to_dict())
    assert theta == 1e4
    config = LlamaConfig(**shape, rope_scaling=scaling)  # type: ignore[arg-type]
    ours = Llama(config, strategy=STRATEGIES["full"], kernel="reference", rotary=RotaryConfig())
    ours.load_state_dict({key.removeprefix("model."): value for key, value in theirs.state_dict().items()})
    tokens = torch.randint(97, (1, 40), generator=torch.Generator().manual_seed(1))
    position = torch.arange(start, start + 40)[None]
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), position)
    tables = ours.rotary_tables(position, torch.float32)
    if name != "dynamic":  # theirs takes the length as a float32 tensor on the way
        assert torch.equal(tables.cos_BTD, cos) and torch.equal(tables.sin_BTD, sin)
    torch.testing.assert_close(tables.cos_BTD, cos, rtol=0, atol=5e-3 if name == "dynamic" else 0)
    expected = theirs(tokens, position_ids=position).logits
    got = ours.logits(ours(tokens, position, Borders.of(torch.ones_like(tokens, dtype=torch.int32))))
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-3 if name == "dynamic" else 1e-4)


def test_a_part_of_each_head_turns_as_in_phi3() -> None:
    position = torch.tensor([[5, 4000, 77]])
    q, k = (torch.randn(1, heads, 3, 64, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2))
    scaling = ScalingConfig(rope_type="default", partial_rotary_factor=0.75)
    tables = rotary_tables(
        position, config=RotaryConfig(), head_width=64, theta=1e4, compute_dtype=torch.float32, scaling=scaling
    )
    expected = modeling_phi3.apply_rotary_pos_emb(q, k, tables.cos_BTD, tables.sin_BTD)
    for got, theirs in zip(apply_rotary(q, k, tables, "float32"), expected, strict=True):
        assert torch.equal(got, theirs) and torch.equal(got[..., 48:], theirs[..., 48:])


# Settings and their completion.


def test_the_original_length_is_the_models_own_unless_given() -> None:
    yarn = ScalingConfig(rope_type="yarn", factor=8.0)

    def original(**settings: Any) -> int | None:
        return ModelConfig(**settings).resolve(258, None, yarn).rope_scaling.original_max_position_embeddings

    assert original(preset="llama2_7b") == 4096
    # Not the positions that the scaling shall reach, nor those of a preset that is scaled itself.
    assert original(preset="llama2_7b", max_positions=32_768) == 4096
    assert original(preset="llama3_2_1b") == 8192
    given_one = ScalingConfig(rope_type="yarn", factor=8.0, original_max_position_embeddings=1000)
    assert ModelConfig().resolve(258, None, given_one).rope_scaling == given_one


def test_a_setting_without_a_type_leaves_the_models_own() -> None:
    own = ModelConfig(preset="llama3_2_1b").resolve(258).rope_scaling
    assert own.factor == 32
    assert ModelConfig(preset="llama3_2_1b").resolve(258, None, ScalingConfig()).rope_scaling == own
    assert ModelConfig(preset="llama3_2_1b").resolve(258, None, NO_SCALING).rope_scaling == NO_SCALING


def test_the_share_that_turns_stays_under_another_scaling() -> None:
    own = ScalingConfig(rope_type="default", partial_rotary_factor=0.5)
    got = ScalingConfig(rope_type="linear", factor=2.0).completed(own, max_positions=100)
    assert got == ScalingConfig(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)


def first_words(broken: list[str]) -> list[str]:
    return [line.split(" ")[0] for line in broken]


@pytest.mark.parametrize(
    ("written", "keys"),
    [
        ({"rope_type": "yran"}, ["rope_type='yran'"]),
        ({"factor": 2.0, "truncate": False}, ["factor=2.0", "truncate=False"]),
        ({"rope_type": "linear"}, ["factor=None"]),
        ({"rope_type": "dynamic"}, ["factor=None"]),
        ({"rope_type": "ntk"}, ["factor=None"]),
        ({"rope_type": "yarn"}, ["factor=None"]),
        ({"rope_type": "llama3"}, ["factor=None", "low_freq_factor=None", "high_freq_factor=None"]),
        ({"rope_type": "longrope"}, ["short_factor=None", "long_factor=None", "factor=None"]),
        ({"rope_type": "default", "factor": 2.0}, ["factor=2.0"]),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0, "mscale": 1.0}, ["beta_fast=3.0", "mscale=1.0"]),
        ({"rope_type": "linear", "factor": 0.5}, ["factor=0.5"]),
        ({"rope_type": "linear", "factor": math.inf, "partial_rotary_factor": 1.5},
         ["factor=inf", "partial_rotary_factor=1.5"]),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}, ["mscale=1.0"]),
        ({"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}, ["mscale_all_dim=1.0"]),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
         ["attention_factor=1.0"]),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 4.0}, ["beta_fast=1.0"]),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": 40.0}, ["beta_slow=40.0"]),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.0}, ["attention_factor=0.0"]),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
         ["original_max_position_embeddings=0"]),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
         ["high_freq_factor=4.0"]),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0, -1.0], "long_factor": [math.nan]},
         ["short_factor=[1.0,", "long_factor=[nan]"]),
    ],
)  # fmt: skip
def test_every_broken_rule_names_its_key(written: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        RotaryConfig(scaling=ScalingConfig(**written))
    assert first_words(str(error.value).splitlines()) == [f"rotary.scaling.{key}" for key in keys]


@pytest.mark.parametrize(
    ("overrides", "scaling", "key"),
    [
        ({}, {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 16, "long_factor": [1.0] * 15},
         "rotary.scaling.long_factor holds 15 numbers"),
        ({}, {"rope_type": "default", "partial_rotary_factor": 0.35}, "rotary.scaling.partial_rotary_factor=0.35"),
        ({}, {"rope_type": "default", "partial_rotary_factor": 0.01}, "rotary.scaling.partial_rotary_factor=0.01"),
        ({"head_width": 2}, {"rope_type": "ntk", "factor": 2.0}, "rotary.scaling.rope_type='ntk'"),
        ({"rope_theta": 1.0}, {"rope_type": "yarn", "factor": 2.0}, "rotary.scaling.rope_type='yarn'"),
    ],
)  # fmt: skip
def test_a_scaling_that_does_not_fit_the_model(overrides: dict[str, Any], scaling: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError) as error:
        ModelConfig(overrides=overrides).resolve(258, None, ScalingConfig(**scaling))
    assert str(error.value).startswith(key) and len(str(error.value).splitlines()) == 1
    shape = ModelConfig(overrides=overrides).resolve(258)
    with pytest.raises(ValueError) as error:
        Llama(shape, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig(scaling=ScalingConfig(**scaling)))
    assert str(error.value).startswith(key)


def test_a_shape_holds_a_complete_scaling_only() -> None:
    plain = ModelConfig().resolve(258)
    for scaling, key in (
        (ScalingConfig(), "rope_scaling.rope_type=None"),
        (ScalingConfig(rope_type="dynamic", factor=2.0), "rope_scaling.original_max_position_embeddings=None"),
    ):
        with pytest.raises(ValueError, match=key):
            LlamaConfig(**{**vars(plain), "rope_scaling": scaling})


def test_the_digest_tells_scalings_apart() -> None:
    shape = ModelConfig().resolve(258)

    def digest(**scaling: Any) -> str:
        rotary = RotaryConfig(scaling=ScalingConfig(**scaling))
        with torch.device("meta"):
            return Llama(shape, strategy=STRATEGIES["full"], kernel="sdpa", rotary=rotary).frequency_digest()

    long = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 64}
    each = [
        digest(rope_type="default"),
        digest(rope_type="linear", factor=2.0),
        digest(rope_type="dynamic", factor=2.0, original_max_position_embeddings=512),
        digest(rope_type="yarn", factor=2.0),
        digest(rope_type="yarn", factor=2.0, attention_factor=1.5),
        digest(rope_type="longrope", factor=2.0, **long),
        digest(rope_type="longrope", factor=2.0, **{**long, "long_factor": [2.0] * 15 + [2.000001]}),
    ]
    assert len(set(each)) == len(each) and all(len(one) == 16 for one in each)
    assert digest() == each[0], "without a type, the model's own"
    nudged = frequencies(head_width=32, theta=1e4)
    nudged.inverse_P[-1] = torch.nextafter(nudged.inverse_P[-1], torch.tensor(1.0))
    assert frequency_digest(nudged) != frequency_digest(frequencies(head_width=32, theta=1e4))


# Hugging Face's config.json.


LLAMA_3_1 = {
    "rope_theta": 500000.0, "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "scaling", "theta"),
    [
        ({"max_position_embeddings": 4096}, NO_SCALING, None),
        ({"max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 10000}, NO_SCALING, 1e4),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
         NO_SCALING, 5e5),
        (LLAMA_3_1, ScalingConfig(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                  original_max_position_embeddings=8192), 5e5),
        # The oldest form, and one that leaves the original length open.
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2}},
         ScalingConfig(rope_type="linear", factor=2), None),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
         ScalingConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=2048), None),
        # Qwen 2.5's README, and NousResearch/Yarn-Llama-2-7b-64k.
        ({"max_position_embeddings": 32768, "rope_theta": 1e6,
          "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
         ScalingConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768), 1e6),
        ({"max_position_embeddings": 65536, "rope_scaling": {
            "factor": 16.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True}},
         ScalingConfig(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096), None),
        # Phi 3's habit: original length beside the scaling, factor from both lengths.
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
          "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
         ScalingConfig(rope_type="longrope", factor=32.0, short_factor=[1.0], long_factor=[2.0],
                       original_max_position_embeddings=4096), None),
        # Both forms, for old and new readers.
        ({"max_position_embeddings": 64, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2},
          "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
         ScalingConfig(rope_type="linear", factor=2.0), 1e4),
        ({"max_position_embeddings": 10, "partial_rotary_factor": 0.5},
         ScalingConfig(rope_type="default", partial_rotary_factor=0.5), None),
    ],
)  # fmt: skip
def test_reading_a_config(config: dict[str, Any], scaling: ScalingConfig, theta: float | None) -> None:
    assert ScalingConfig.of_hugging_face(config) == (scaling, theta)


@pytest.mark.parametrize(
    ("parameters", "keys"),
    [
        ({"rope_type": "mrope", "mrope_section": [1]}, ["mrope_section=[1]", "rope_type='mrope'"]),
        ({"rope_type": "ntk", "factor": 2.0}, ["rope_type='ntk'"]),
        ({"rope_type": ["linear"], "factor": 2.0, "rope_theta": "1e4"}, ["rope_theta='1e4'", "rope_type=['linear']"]),
        ({"rope_type": "linear", "factor": "2"}, ["factor='2'"]),
        ({"rope_type": "linear", "factor": True}, ["factor=True"]),
        ({"rope_type": "linear"}, ["factor=None"]),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": ["a"], "long_factor": [1.0]}, ["short_factor=['a']"]),
        ({"rope_type": "llama3", "factor": 0.5, "low_freq_factor": 1.0}, ["high_freq_factor=None", "factor=0.5"]),
        ({"factor": 2.0, "rope_theta": 1e4}, ["factor=2.0"]),
        ({"rope_type": "yarn"}, ["factor=None"]),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, ["factor=None"]),
        ({"rope_type": "default", "rope_theta": 0}, ["rope_theta=0"]),
        ({"rope_type": "default", "rope_theta": math.inf}, ["rope_theta=inf"]),
        ({"rope_type": "dynamic", "factor": 1e308}, ["factor=1e+308"]),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": 1e-320}, ["beta_slow=1e-320"]),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**400},
            ["original_max_position_embeddings=" + "1" + "0" * 400],
        ),
    ],
)
def test_a_config_with_mistakes(parameters: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ScalingConfig.of_hugging_face({"max_position_embeddings": 64, "rope_parameters": parameters})
    assert first_words(str(error.value).splitlines()) == [f"rope_parameters.{key}" for key in keys]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                              "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
         ["rope_parameters", "layers of type full_attention, sliding_attention", "only one setting for all layers"]),
        ({"rope_parameters": {"rope_theta": 1e4, "full_attention": {"rope_type": "linear", "factor": 2.0}}},
         ["rope_parameters", "layers of type full_attention"]),
        # Of these two transformers takes the second.
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
          "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
         ["rope_parameters=", "rope_scaling=", "different things", "Leave one out"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 1e6,
          "rope_scaling": {"rope_type": "default"}}, ["rope_parameters=", "different things"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": "linear"},
         ["rope_scaling='linear' must hold keys and values"]),
        ({"rope_scaling": ["linear", 2.0]}, ["rope_scaling=['linear', 2.0] must hold keys and values"]),
    ],
)  # fmt: skip
def test_what_says_more_than_one_thing_is_refused(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ScalingConfig.of_hugging_face({"max_position_embeddings": 64, **config})
    assert all(word in str(error.value) for word in words) and len(str(error.value).splitlines()) == 1


def test_positions_that_are_no_number() -> None:
    with pytest.raises(ValueError, match=r"^max_position_embeddings='4096' must be a whole number"):
        ScalingConfig.of_hugging_face({"max_position_embeddings": "4096", "rope_scaling": {"type": "dynamic"}})


@pytest.mark.parametrize("name", [*NAMES, "ntk"])
def test_what_is_written_is_what_transformers_computes(name: str) -> None:
    """Through the JSON text of a config.json, read by transformers and by us."""
    if name == "ntk":
        scaling = ScalingConfig(rope_type="ntk", factor=3.0)
    else:
        source = {"max_position_embeddings": ORIGINAL, "rope_parameters": settings(64)[name]}
        scaling, _ = ScalingConfig.of_hugging_face(source)
    written = json.loads(json.dumps(scaling.to_hugging_face(theta=5e5, head_width=64, max_positions=32_768)))
    theirs = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, head_dim=64, **written)
    for length in (None, 10_000):
        expected, factor = their_frequencies(theirs, length)
        got = frequencies(head_width=64, theta=5e5, scaling=scaling, length=length)
        assert torch.equal(got.inverse_P, expected) and got.attention_factor == factor
    if name != "ntk":
        assert ScalingConfig.of_hugging_face(written) == (scaling, 5e5)
