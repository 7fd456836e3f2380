"""Published shapes, and what a user may write to change one."""

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from modules.attention.strategies import STRATEGIES
from modules.llama import Llama, LlamaConfig, parameter_count
from modules.presets import PRESETS, ModelConfig
from modules.rotary import RotaryConfig


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("smollm2_135m", 134_515_008),
        ("tinyllama_1_1b", 1_100_048_384),
        ("llama3_2_1b", 1_235_814_400),
        ("llama2_7b", 6_738_415_616),
        ("llama3_8b", 8_030_261_248),
    ],
)
def test_published_models_have_their_published_number_of_parameters(preset: str, published: int) -> None:
    """As the checkpoints' safetensors headers add up."""
    assert parameter_count(ModelConfig(preset=preset).resolve(vocabulary_size=258)) == published


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds_on_the_meta_device(preset: str) -> None:
    config = ModelConfig(preset=preset).resolve(vocabulary_size=258)
    with torch.device("meta"):
        model = Llama(config, strategy=STRATEGIES["anchor"], kernel="auto", rotary=RotaryConfig())
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)


def test_our_own_presets_take_the_tokenizers_vocabulary() -> None:
    debug = ModelConfig().resolve(vocabulary_size=258)
    assert debug == LlamaConfig(
        vocabulary_size=258, width=128, layers=4, heads=4, kv_heads=2, head_width=32, hidden_width=512,
        norm_epsilon=1e-5, tied_embeddings=True, rope_theta=10_000.0, max_positions=2048,
    )  # fmt: skip
    assert 0.9e6 < parameter_count(debug) < 1.1e6
    assert 14e6 < parameter_count(ModelConfig(preset="tiny").resolve(vocabulary_size=258)) < 16e6
    assert ModelConfig(preset="llama2_7b").resolve(vocabulary_size=258).vocabulary_size == 32_000


def test_overrides_change_the_shape() -> None:
    config = ModelConfig(
        overrides={"width": 96, "layers": 2, "rope_theta": 500_000, "tied_embeddings": False, "vocabulary_size": 300}
    ).resolve(vocabulary_size=258)
    assert (config.width, config.layers, config.head_width, config.vocabulary_size) == (96, 2, 24, 300)
    assert (config.rope_theta, config.tied_embeddings) == (500_000, False)
    assert ModelConfig(overrides={"head_width": 64}).resolve(258).head_width == 64


def test_theta_and_positions() -> None:
    assert ModelConfig().resolve(258, rope_theta=1e6).rope_theta == 1e6
    assert ModelConfig(preset="llama3_8b").resolve(258).rope_theta == 500_000.0
    assert ModelConfig(max_positions=65_536).resolve(258).max_positions == 65_536


@pytest.mark.parametrize(
    ("settings", "key", "hint"),
    [
        ({"preset": "llama3-8b"}, "model.preset='llama3-8b'", "Did you mean 'llama3_8b'?"),
        ({"max_positions": 0}, "model.max_positions=0", "at least 1"),
        ({"overrides": {"layres": 3}}, "model.overrides.layres", "Did you mean 'layers'?"),
        ({"overrides": {"zzz": 3}}, "model.overrides.zzz", "Known: vocabulary_size, width"),
        ({"overrides": {"layers": 2.5}}, "model.overrides.layers=2.5", "int"),
        ({"overrides": {"layers": "2"}}, "model.overrides.layers='2'", "int"),
        ({"overrides": {"layers": True}}, "model.overrides.layers=True", "int"),
        ({"overrides": {"tied_embeddings": 1}}, "model.overrides.tied_embeddings=1", "bool"),
        ({"overrides": {"norm_epsilon": None}}, "model.overrides.norm_epsilon=None", "float"),
        ({"max_positions": 5, "overrides": {"max_positions": 6}}, "model.overrides.max_positions=6", "Leave one out"),
    ],
)
def test_wrong_settings_name_their_key(settings: dict[str, Any], key: str, hint: str) -> None:
    with pytest.raises(ValueError) as error:
        ModelConfig(**settings)
    assert key in str(error.value) and hint in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "arguments", "lines"),
    [
        ({"width": 130}, {}, ["model.overrides.width: width=130 is no multiple of heads=4"]),
        ({"kv_heads": 3}, {}, ["model.overrides.heads=4 is no multiple of kv_heads=3"]),
        ({"width": 12}, {}, ["model.overrides.head_width=3 must be even"]),
        ({"heads": 0}, {}, ["model.overrides.heads=0 must be at least 1"]),
        ({"norm_epsilon": 0.0}, {}, ["model.overrides.norm_epsilon=0.0 must be a finite number above 0"]),
        (
            {"width": 130, "kv_heads": 3, "layers": 0},
            {},
            ["model.overrides.width: width=130", "model.overrides.layers=0"],
        ),
        (
            {"vocabulary_size": 200},
            {},
            ["model.overrides.vocabulary_size: the model has 200 tokens, the tokenizer 258"],
        ),
        ({"rope_theta": 1e4}, {"rope_theta": 2e4}, ["rotary.theta=20000.0 and model.overrides.rope_theta=10000.0"]),
    ],
)
def test_shapes_that_do_not_fit_name_every_broken_rule(
    overrides: dict[str, Any], arguments: dict[str, Any], lines: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        ModelConfig(overrides=overrides).resolve(vocabulary_size=258, **arguments)
    for line in lines:
        assert any(got.startswith(line) for got in str(error.value).splitlines()), str(error.value)


def test_a_tokenizer_larger_than_a_published_vocabulary() -> None:
    with pytest.raises(ValueError, match="the model has 32000 tokens, the tokenizer 128256"):
        ModelConfig(preset="llama2_7b").resolve(vocabulary_size=128_256)


def test_the_config_is_filled_by_omegaconf() -> None:
    merged = OmegaConf.merge(
        OmegaConf.structured(ModelConfig), {"preset": "tiny"}, OmegaConf.from_dotlist(["overrides.layers=2"])
    )
    assert OmegaConf.to_object(merged) == ModelConfig(preset="tiny", overrides={"layers": 2})
