"""Checkpoints of Hugging Face's four architectures, held to transformers with the same weights, both ways."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from modules.hf_config import read_shape, shape_as_json
from modules.hf_weights import check_weights, load_weights, save_checkpoint
from modules.llama import Llama, parameter_count
from modules.rotary import RotaryConfig

SIZES = dict(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10_000.0)
FAMILIES = {
    "llama 2": ("Llama", dict(SIZES, num_key_value_heads=4)),
    "llama 3.1": ("Llama", dict(SIZES, rope_parameters=dict(LLAMA3, rope_theta=500_000.0))),
    "llama 3.2, tied": ("Llama", dict(SIZES, tie_word_embeddings=True, head_dim=16)),
    "llama with biases": ("Llama", dict(SIZES, attention_bias=True, mlp_bias=True, rope_parameters=YARN)),
    "mistral": ("Mistral", dict(SIZES, sliding_window=None, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "qwen2": ("Qwen2", dict(SIZES, tie_word_embeddings=True, rms_norm_eps=1e-6)),
    "qwen3": ("Qwen3", dict(SIZES, head_dim=24, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "qwen3 with biases": ("Qwen3", dict(SIZES, head_dim=16, attention_bias=True)),
}


def theirs(family, **more):
    """A model of transformers' whose every parameter is random, norms and biases too."""
    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.1)
            if "norm" in name:
                parameter += 1
    return model


def ours(directory, **options):
    model = Llama(read_shape(directory), strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig(**options))
    load_weights(model, directory)
    return model.eval()


def tokens_BT():
    return torch.randint(97, (2, 100), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, tokens):
    if not isinstance(model, Llama):
        return model(tokens).logits
    position = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model.logits(model(tokens, position, Borders.of(torch.ones_like(tokens))))


def config_json(model, **changed):
    given = dict(theta=model.theta, scaling=model.scaling, dtype=torch.float32, bos_id=1, end_id=2)
    return shape_as_json(model.config, **(given | changed))


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_reads_what_transformers_wrote(family, sharded, tmp_path):
    model = theirs(family)
    model.save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "5GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 if sharded else (tmp_path / "model.safetensors").is_file()
    mine = ours(tmp_path)
    torch.testing.assert_close(logits(mine, tokens_BT()), logits(model, tokens_BT()), rtol=0, atol=1e-4)
    assert parameter_count(mine.config) == sum(p.numel() for p in mine.parameters())


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_writes_what_transformers_reads(family, sharded, tmp_path):
    theirs(family).save_pretrained(tmp_path / "theirs")
    mine = ours(tmp_path / "theirs")
    save_checkpoint(tmp_path / "ours", mine.state_dict(), config_json(mine), shard_bytes=60_000 if sharded else 10**9)
    assert (tmp_path / "ours" / "model.safetensors.index.json").is_file() == sharded
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert again.config.vocab_size == 97 and (again.config.bos_token_id, again.config.eos_token_id) == (1, 2)
    torch.testing.assert_close(logits(again.eval(), tokens_BT()), logits(mine, tokens_BT()), rtol=0, atol=1e-4)
    assert read_shape(tmp_path / "ours") == mine.config


def test_the_theta_and_scaling_of_the_run_are_written(tmp_path):
    """A model extended by other frequencies than its checkpoint's: transformers must compute with the new ones."""
    from modules.rotary_scaling import ScalingConfig

    theirs("llama 2").save_pretrained(tmp_path / "theirs")
    scaling = ScalingConfig(rope_type="yarn", factor=4.0)
    mine = ours(tmp_path / "theirs", theta=50_000.0, scaling=scaling)
    save_checkpoint(tmp_path / "ours", mine.state_dict(), config_json(mine))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(logits(again, tokens_BT()), logits(mine, tokens_BT()), rtol=0, atol=1e-4)
    assert not torch.allclose(logits(mine, tokens_BT()), logits(ours(tmp_path / "theirs"), tokens_BT()), atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_arrive_bit_for_bit(dtype, tmp_path):
    theirs("llama 2").to(dtype).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name, parameter in ours(tmp_path).named_parameters():
        there = stored[name if name.startswith("lm_head") else f"model.{name}"]
        assert there.dtype == dtype and torch.equal(parameter, there.float())


def test_old_inverse_frequencies_and_a_repeated_tied_head_are_no_surprise(tmp_path):
    """Llama 2 checkpoints hold `rotary_emb.inv_freq`; some writers repeat the tied matrix."""
    theirs("llama 3.2, tied").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    expected = logits(ours(tmp_path), tokens_BT())
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": stored["model.embed_tokens.weight"].clone(),
    }
    save_file(stored | more, tmp_path / "model.safetensors")
    assert torch.equal(logits(ours(tmp_path), tokens_BT()), expected)
    save_file(stored | more | {"lm_head.weight": torch.ones(97, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        ours(tmp_path)


def test_every_wrong_tensor_is_listed(tmp_path):
    theirs("llama 2").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"], stored["lm_head.weight"]
    stored["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    stored["model.norm.weight"] = torch.zeros(47)
    stored["model.embed_tokens.weight"] = stored["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        check_weights(tmp_path, read_shape(tmp_path))
    for part in (
        "missing model.layers.1.mlp.up_proj.weight [80, 48]",
        "missing lm_head.weight [97, 48]",
        "unexpected model.layers.0.self_attn.q_proj.bias [48]",
        "model.norm.weight is [47], not [48]",
        "model.embed_tokens.weight is stored as F8_E4M3",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="missing"):
        ours(tmp_path)


def test_broken_files_are_refused(tmp_path):
    model = theirs("llama 2")
    model.save_pretrained(tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model\.safetensors: is broken or cut short"):
        ours(tmp_path / "cut")

    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    sorted((tmp_path / "shards").glob("*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match=r"index\.json: names model-00002-of-0000\d\.safetensors, missing"):
        ours(tmp_path / "shards")
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../up.safetensors"}})
    )
    with pytest.raises(ValueError, match="no file of this directory"):
        ours(tmp_path / "shards")


class _Trap:
    """Unpickling it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


def test_a_pickle_is_never_opened(tmp_path):
    theirs("llama 2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"x": _Trap(tmp_path / "mark")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"as pickle \(pytorch_model\.bin\).*save_pretrained\(NEW_FOLDER\)"):
        ours(tmp_path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is none of llama, mistral, qwen2, qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM can be read"),
        ({"model_type": "mistral", "architectures": None, "sliding_window": 128}, "sliding_window=128"),
        (
            {"model_type": "qwen2", "architectures": None, "use_sliding_window": True, "sliding_window": 64},
            "sliding_window=64",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"hidden_size": "48"}, "hidden_size='48' must be a whole number"),
        ({"num_attention_heads": None}, "num_attention_heads=None must be a whole number"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type='spiral' is not known"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "factor=None is needed by rope_type='linear'",
        ),
        ({"quantization_config": {"bits": 4}}, "quantised weights cannot be read"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types holds sliding_attention"),
    ],
)
def test_a_config_of_something_else_is_refused(changed, message, tmp_path):
    theirs("llama 2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        read_shape(tmp_path)
    assert message in str(error.value)


def test_an_inactive_sliding_window_is_none(tmp_path):
    """Qwen2 names a window that it does not use; one as long as the model reaches changes nothing."""
    theirs("qwen2", sliding_window=64, use_sliding_window=False).save_pretrained(tmp_path / "qwen2")
    read_shape(tmp_path / "qwen2")
    theirs("mistral").save_pretrained(tmp_path / "mistral")
    path = tmp_path / "mistral" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": 256}))
    read_shape(tmp_path / "mistral")


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, monkeypatch):
    theirs("llama 2").save_pretrained(tmp_path / "theirs")
    mine = ours(tmp_path / "theirs")
    with pytest.raises(ValueError, match="not empty"):
        save_checkpoint(tmp_path / "theirs", mine.state_dict(), config_json(mine))
    unwritable = {"a/b": b""}
    with pytest.raises(OSError):
        save_checkpoint(tmp_path / "ours", mine.state_dict(), config_json(mine), more_files=unwritable)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_what_transformers_would_compute_otherwise_is_not_written(tmp_path):
    from dataclasses import replace

    from modules.rotary_scaling import ScalingConfig

    theirs("llama 2").save_pretrained(tmp_path)
    mine = ours(tmp_path)
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5"):
        config_json(mine, scaling=ScalingConfig(rope_type="default", partial_rotary_factor=0.5))
    with pytest.raises(ValueError, match="no architecture of transformers"):
        shape_as_json(
            replace(mine.config, qk_norm=True, mlp_bias=True), theta=1e4, scaling=mine.scaling, dtype=torch.float32,
            bos_id=None, end_id=None,
        )  # fmt: skip
