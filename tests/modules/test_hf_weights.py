"""Checkpoints held to transformers: theirs read by us and ours read by them compute the same logits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from modules.hf_config import json_of_shape, shape_of_json
from modules.hf_tensors import checkpoint_digest
from modules.hf_weights import load_weights, new_folder, read_shape, save_checkpoint
from modules.llama import Llama, LlamaConfig, parameter_count
from modules.optim import OptimizerConfig, build_optimizer
from modules.rotary import RotaryConfig
from modules.rotary_scaling import ScalingConfig

SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, rms_norm_eps=1e-5,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama 2": (transformers.LlamaConfig, {"num_key_value_heads": 6}),
    "llama 3.1": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama 3.2, tied": (transformers.LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, all biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": (transformers.LlamaConfig, {"head_dim": 12, "num_key_value_heads": 1}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "mistral, odd heads": (
        transformers.MistralConfig,
        {"sliding_window": None, "num_attention_heads": 10, "head_dim": 6},
    ),
    "qwen2": (transformers.Qwen2Config, {"rope_parameters": YARN}),
    "qwen2, tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3, tied, biases": (transformers.Qwen3Config, {"attention_bias": True, "tie_word_embeddings": True}),
}
TOKENS = torch.randint(97, (2, 200), generator=torch.Generator().manual_seed(1))


def their_model(family: str) -> transformers.PreTrainedModel:
    """With biases and norms that are not what they start as."""
    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**(SIZES | changes)), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model.eval()


def our_model(shape: LlamaConfig, device: str = "cpu") -> Llama:
    with torch.device(device):
        return Llama(shape, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig())


def read(directory: Path) -> Llama:
    model = our_model(read_shape(directory), "meta")
    load_weights(model, directory)
    return model


@torch.no_grad()
def our_logits(model: Llama) -> Tensor:
    position_BT = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    return model.logits(model(TOKENS, position_BT, Borders.of(torch.ones_like(TOKENS))))


@torch.no_grad()
def their_logits(model: Any) -> Tensor:
    return model(TOKENS, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_both_read_what_the_other_writes(family: str, tmp_path: Path) -> None:
    theirs = their_model(family)
    expected = their_logits(theirs)
    assert expected.std() > 0.3
    theirs.save_pretrained(tmp_path / "theirs")
    ours = read(tmp_path / "theirs")
    torch.testing.assert_close(our_logits(ours), expected, rtol=0, atol=1e-4)
    assert parameter_count(ours.config) == sum(p.numel() for p in ours.parameters())

    save_checkpoint(ours, tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    torch.testing.assert_close(their_logits(back), expected, rtol=0, atol=1e-4)
    assert back.config.rope_parameters == theirs.config.rope_parameters
    assert back.config.vocab_size == 97 and back.dtype == torch.float32
    assert read_shape(tmp_path / "ours") == ours.config


@pytest.mark.parametrize("family", ["llama 2", "qwen3, tied, biases"])
def test_shards_in_both_directions(family: str, tmp_path: Path) -> None:
    theirs = their_model(family)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    ours = read(tmp_path / "theirs")
    torch.testing.assert_close(our_logits(ours), their_logits(theirs), rtol=0, atol=1e-4)

    save_checkpoint(ours, tmp_path / "ours", max_shard_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * parameter_count(ours.config)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    torch.testing.assert_close(their_logits(back), their_logits(theirs), rtol=0, atol=1e-4)
    assert torch.equal(our_logits(read(tmp_path / "ours")), our_logits(ours))


@pytest.mark.parametrize(
    "scaling",
    [
        ScalingConfig(rope_type="linear", factor=4.0),
        ScalingConfig(rope_type="ntk", factor=4.0),
        ScalingConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=64),
        ScalingConfig(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, attention_factor=1.3),
        ScalingConfig(
            rope_type="longrope", factor=4.0, original_max_position_embeddings=128, short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 3.0, 4.0],
        ),
    ],
    ids=lambda scaling: scaling.rope_type,
)  # fmt: skip
def test_scaling_and_theta_set_beside_the_shape_are_written(scaling: ScalingConfig, tmp_path: Path) -> None:
    """Rows of 200 tokens: `dynamic` and `longrope` are beyond their original length."""
    own = read_config("llama 2", num_key_value_heads=2)
    torch.manual_seed(0)
    rotary = RotaryConfig(theta=3e4, scaling=scaling)
    ours = Llama(own, strategy=STRATEGIES["full"], kernel="sdpa", rotary=rotary)
    for parameter in ours.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    save_checkpoint(ours, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    torch.testing.assert_close(their_logits(theirs), our_logits(ours), rtol=0, atol=1e-4)
    torch.testing.assert_close(our_logits(read(tmp_path / "ours")), our_logits(ours), rtol=0, atol=1e-5)


def read_config(family: str, **changes: Any) -> LlamaConfig:
    kind, own = FAMILIES[family]
    return shape_of_json(kind(**(SIZES | own | changes)).to_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_load_in_the_models_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = their_model("qwen3")
    theirs.save_pretrained(tmp_path / "theirs")
    for device in ("meta", "cpu"):
        model = our_model(read_shape(tmp_path / "theirs"), device).to(dtype)
        load_weights(model, tmp_path / "theirs")
        for name, value in theirs.state_dict().items():
            assert torch.equal(model.state_dict()[name.removeprefix("model.")], value.to(dtype)), name
    save_checkpoint(model, tmp_path / "ours")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").dtype == dtype


def test_a_small_config_json_means_what_its_family_means() -> None:
    """Held to transformers' classes with the same few keys."""
    few = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    few["num_attention_heads"] = 32
    for name, kind in [("llama", transformers.LlamaConfig), ("mistral", transformers.MistralConfig),
                       ("qwen2", transformers.Qwen2Config), ("qwen3", transformers.Qwen3Config)]:  # fmt: skip
        given = few | {"hidden_size": 128} | ({"sliding_window": None} if name == "mistral" else {})
        theirs, ours = kind(**given), shape_of_json({"model_type": name, **given})
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.head_width == (getattr(theirs, "head_dim", None) or 128 // 32)
        assert ours.max_positions == theirs.max_position_embeddings
        assert ours.norm_epsilon == theirs.rms_norm_eps
        assert ours.tied_embeddings == theirs.tie_word_embeddings
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama 2", {"model_type": "gpt_neox"}, "model_type='gpt_neox' is another architecture"),
        ("llama 2", {"model_type": None}, "model_type=None"),
        ("llama 2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("mistral", {"sliding_window": 4096}, "sliding_window=4096"),
        ("mistral", {"sliding_window": ...}, "sliding_window is not given"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128}, "sliding_window=128"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types holds sliding_attention"),
        ("llama 2", {"vocab_size": ...}, "vocab_size is missing"),
        ("llama 2", {"hidden_size": "48"}, "hidden_size='48' must be a whole number"),
        ("llama 2", {"head_dim": ..., "hidden_size": 50}, "head_dim is missing"),
        ("llama 2", {"num_key_value_heads": 4}, "kv_heads=4"),
        ("llama 2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
        ("llama 2", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama 2", {"rope_parameters": {"rope_type": "magic"}}, "magic"),
        ("llama 2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_a_config_that_means_something_else_is_refused(
    family: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    kind, own = FAMILIES[family]
    written = kind(**(SIZES | own)).to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in written.items() if v is not ...}))
    with pytest.raises(ValueError, match=r"config\.json: ") as refusal:
        read_shape(tmp_path)
    assert named in str(refusal.value)


def test_qwen2_with_a_window_that_is_switched_off_is_full_attention() -> None:
    assert read_config("qwen2", use_sliding_window=False, sliding_window=4096).attention_bias


def test_all_mistakes_of_a_config_at_once() -> None:
    with pytest.raises(ValueError, match="hidden_act") as refusal:
        shape_of_json({"model_type": "mistral", "hidden_act": "relu", "vocab_size": 0.5, "hidden_size": 8})
    for key in ("sliding_window", "vocab_size=0.5", "intermediate_size is missing", "num_hidden_layers is missing"):
        assert key in str(refusal.value)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    their_model("llama 2").save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def refusal(directory: Path) -> str:
    """What is said, after which the model is as it was."""
    model = our_model(read_shape(directory))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError) as error:
        load_weights(model, directory)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return str(error.value)


def test_missing_unexpected_and_misshaped_tensors_are_all_listed(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        del tensors[name]
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["model.layers.2.self_attn.k_proj.weight"] = torch.ones(16, 48)
    tensors["lm_head.weight"] = torch.ones(97, 48, dtype=torch.int8)
    save_file(tensors, checkpoint / "model.safetensors")
    said = refusal(checkpoint)
    assert said.count("\n") == 5 and "in 5 tensors" in said and "inv_freq" not in said
    assert "missing: model.norm.weight [48]" in said
    assert "missing: model.layers.1.mlp.up_proj.weight [80, 48]" in said
    assert "unexpected: model.layers.0.self_attn.q_norm.weight [8]" in said
    assert "of another shape: model.layers.2.self_attn.k_proj.weight is [16, 48] in the file and [48, 48]" in said
    assert "of another kind: lm_head.weight holds I8" in said


def test_inverse_frequencies_and_an_equal_head_are_no_mistake(tmp_path: Path) -> None:
    theirs = their_model("qwen2, tied")
    theirs.save_pretrained(tmp_path / "tied")
    tensors = load_file(tmp_path / "tied/model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "tied/model.safetensors")
    torch.testing.assert_close(our_logits(read(tmp_path / "tied")), their_logits(theirs), rtol=0, atol=1e-4)
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, tmp_path / "tied/model.safetensors")
    assert "lm_head.weight and model.embed_tokens.weight are not equal" in refusal(tmp_path / "tied")


def test_a_file_cut_short_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    whole = file.read_bytes()
    for kept in (0, 5, 100, len(whole) - 1):
        file.write_bytes(whole[:kept])
        assert f"{file}: is no whole safetensors file ({kept} bytes" in refusal(checkpoint)


def test_a_missing_shard_and_a_wrong_index_are_named(tmp_path: Path) -> None:
    their_model("llama 2").save_pretrained(tmp_path, max_shard_size="40KB")
    second = sorted(tmp_path.glob("*.safetensors"))[1]
    kept = second.read_bytes()
    second.unlink()
    assert second.name in (said := refusal(tmp_path)) and "index.json" in said
    second.write_bytes(kept)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = second.name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"says that {second.name} holds model.norm.weight" in refusal(tmp_path)
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names files elsewhere" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[")
    assert "is no JSON" in refusal(tmp_path)


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_pickle_is_never_opened(name: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    torch.save(Trap(tmp_path / "sprung"), checkpoint / name)
    said = refusal(checkpoint)
    assert name in said and "save_pretrained" in said
    assert not (tmp_path / "sprung").exists()
    (checkpoint / name).unlink()
    assert "has neither model.safetensors nor" in refusal(checkpoint)


def test_shapes_that_no_family_has_are_not_written(tmp_path: Path) -> None:
    plain = read_config("llama 2")
    for changes, named in [
        ({"qk_norm": True, "attention_bias": True}, "qk_norm=True"),
        ({"mlp_bias": True, "qk_norm": True}, "mlp_bias=True"),
        ({"attention_output_bias": True}, "attention_output_bias=True"),
        ({"rope_scaling": ScalingConfig(rope_type="default", partial_rotary_factor=0.5)}, "partial_rotary_factor=0.5"),
    ]:
        with pytest.raises(ValueError, match=named):
            save_checkpoint(our_model(replace(plain, **changes)), tmp_path / "new")
        assert list(tmp_path.iterdir()) == []


def test_a_full_folder_is_not_written_into_and_a_stopped_write_leaves_nothing(tmp_path: Path) -> None:
    model = our_model(read_config("llama 2"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not empty"):
        save_checkpoint(model, tmp_path / "full")
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "stopped") as folder:
        (folder / "half").write_text("")
        raise KeyboardInterrupt
    (tmp_path / ".empty.999999999.partial").mkdir()  # of a killed process
    (tmp_path / "empty").mkdir()
    save_checkpoint(model, tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]
    assert read_shape(tmp_path / "empty") == model.config


def test_the_digest_is_of_the_content_and_not_of_the_place(checkpoint: Path, tmp_path: Path) -> None:
    first = checkpoint_digest(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert checkpoint_digest(tmp_path / "copy") == first
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"][7] += 1e-3
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_digest(checkpoint) != first
    config = json.loads((tmp_path / "copy/config.json").read_text()) | {"rms_norm_eps": 1e-6}
    (tmp_path / "copy/config.json").write_text(json.dumps(config))
    assert checkpoint_digest(tmp_path / "copy") != first


@pytest.mark.parametrize("flags", [(1, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 1), (0, 1, 1, 0)])
def test_parameters_are_counted_without_building(flags: tuple[int, ...]) -> None:
    names = ("attention_bias", "attention_output_bias", "mlp_bias", "qk_norm")
    shape = replace(read_config("llama 2", num_key_value_heads=2), **dict(zip(names, map(bool, flags), strict=True)))
    assert parameter_count(shape) == sum(p.numel() for p in our_model(shape, "meta").parameters())


def test_the_older_form_of_the_frequencies_stands_beside_the_newer() -> None:
    written = json_of_shape(read_config("llama 3.1"), dtype="float32")
    older = {key: value for key, value in written.items() if key != "rope_parameters"}
    newer = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    assert shape_of_json(older) == shape_of_json(newer) == read_config("llama 3.1")


@torch.no_grad()
def test_what_attention_projects_is_biased_and_normed_and_not_yet_rotated() -> None:
    """Held to transformers' own projections and norms; under autocast all three come in the low dtype."""
    theirs = their_model("qwen3, tied, biases")
    model = our_model(read_config("qwen3, tied, biases"))
    model.load_state_dict({k.removeprefix("model."): v for k, v in theirs.model.state_dict().items()})
    hidden_BTE = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(2))
    attention = theirs.model.layers[1].self_attn
    expected = (
        attention.q_norm(attention.q_proj(hidden_BTE).unflatten(-1, (6, 128))).flatten(-2),
        attention.k_norm(attention.k_proj(hidden_BTE).unflatten(-1, (2, 128))).flatten(-2),
        attention.v_proj(hidden_BTE),
    )
    got = model.layers[1].self_attn.projected(hidden_BTE)
    for ours, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        low = model.layers[1].self_attn.projected(hidden_BTE)
    for ours, wanted in zip(low, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), wanted, rtol=0.03, atol=0.03)


def test_norms_and_biases_do_not_decay() -> None:
    model = our_model(read_config("qwen3, tied, biases"))
    decays, stays = build_optimizer(model, OptimizerConfig(weight_decay=0.5)).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(names[id(p)].endswith(("_proj.weight", "embed_tokens.weight")) for p in decays["params"])
    assert all(names[id(p)].endswith(("norm.weight", ".bias")) for p in stays["params"])
    assert stays["weight_decay"] == 0 and len(decays["params"]) + len(stays["params"]) == len(names)
