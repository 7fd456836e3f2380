"""`config.json` of a Hugging Face checkpoint to a model's shape, and back.

    {"model_type": "qwen3", "hidden_size": 1024, ...}  <->  LlamaConfig

Read are Llama, Mistral, Qwen2 and Qwen3; whatever would compute something else than `modules/llama.py` is refused by
its key. Written is the family that a shape belongs to: q/k norms make it a Qwen3, biases on q, k and v alone a Qwen2.

Source: `configuration_llama.py`, `_mistral`, `_qwen2` and `_qwen3` of transformers 5, their defaults included.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modules.llama import LlamaConfig
from modules.rotary_scaling import ScalingConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a `model_type` means where its `config.json` is silent."""

    max_positions: int
    kv_heads: int | None = None
    """None: as many as heads."""
    head_width: int | None = None
    """None: width / heads."""
    sliding_window: int | None = None
    window_is_switched: bool = False
    """The window counts only where `use_sliding_window` is true."""


FAMILIES = {
    "llama": Family(max_positions=2048),
    "mistral": Family(max_positions=131_072, kv_heads=8, sliding_window=4096),
    "qwen2": Family(max_positions=32_768, kv_heads=32, window_is_switched=True),
    "qwen3": Family(max_positions=32_768, kv_heads=32, head_width=128, window_is_switched=True),
}

_SIZES = {
    "vocab_size": "vocabulary_size",
    "hidden_size": "width",
    "intermediate_size": "hidden_width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
}


def shape_of_json(config_json: Mapping[str, Any]) -> LlamaConfig:
    """The shape that transformers would build from a `config.json`.

    Raises:
        ValueError: another architecture, or keys that are missing, of a wrong kind or not supported; all at once.
    """
    name = config_json.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"model_type={name!r} is another architecture. Known: {', '.join(FAMILIES)}.")
    family, broken = FAMILIES[name], _unsupported(config_json, FAMILIES[name])

    def value(key: str, kind: type, default: Any = None) -> Any:
        found = config_json.get(key)
        found = default if found is None else found
        fits = isinstance(found, kind) or (kind is float and isinstance(found, int))
        if not fits or (isinstance(found, bool) and kind is not bool):
            words = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
            broken.append(f"{key} is missing." if found is None else f"{key}={found!r} must be {words}.")
            return kind(1)
        return kind(found)

    shape: dict[str, Any] = {ours: value(theirs, int) for theirs, ours in _SIZES.items()}
    width, heads = shape["width"], shape["heads"]
    shape["kv_heads"] = value("num_key_value_heads", int, family.kv_heads or heads)
    if config_json.get("head_dim") is None and family.head_width is None and heads > 0 and width % heads:
        broken.append(f"head_dim is missing, and hidden_size={width} is no multiple of num_attention_heads={heads}.")
    shape["head_width"] = value("head_dim", int, family.head_width or width // max(heads, 1))
    shape["max_positions"] = value("max_position_embeddings", int, family.max_positions)
    shape["norm_epsilon"] = value("rms_norm_eps", float, 1e-6)
    shape["tied_embeddings"] = value("tie_word_embeddings", bool, False)
    all_biases = name in ("llama", "qwen3") and value("attention_bias", bool, False)
    shape["attention_bias"] = all_biases or name == "qwen2"
    shape["attention_output_bias"] = all_biases
    shape["mlp_bias"] = name == "llama" and value("mlp_bias", bool, False)
    shape["qk_norm"] = name == "qwen3"
    try:
        scaling, theta = ScalingConfig.of_hugging_face(config_json)
        shape |= {"rope_scaling": scaling, "rope_theta": 10_000.0 if theta is None else theta}
        if (share := scaling.partial_rotary_factor) is not None and share != 1:
            broken.append(
                f"partial_rotary_factor={share!r} means nothing to model_type={name!r}: transformers turns all "
                "dimensions there. Remove it, or set rotary.scaling.partial_rotary_factor for a model of your own."
            )
    except ValueError as error:
        broken += str(error).splitlines()
    if not broken:
        try:
            return LlamaConfig(**shape)
        except ValueError as error:
            broken += str(error).splitlines()
    raise ValueError("\n".join(broken))


def _unsupported(config_json: Mapping[str, Any], family: Family) -> list[str]:
    """Settings that would change what is computed, a sentence each."""
    broken = []
    if (act := config_json.get("hidden_act", "silu")) not in ("silu", "swish"):
        broken.append(f"hidden_act={act!r} is not supported: the model computes silu.")
    window = config_json.get("sliding_window", family.sliding_window)
    if window is not None and (not family.window_is_switched or config_json.get("use_sliding_window")):
        given = "is not given, which means 4096 here" if "sliding_window" not in config_json else f"={window!r}"
        broken.append(
            f"sliding_window{'' if given[0] == '=' else ' '}{given}: a window in all or some layers of a checkpoint is "
            'not supported. For full attention, as in Mistral from v0.2 on, write "sliding_window": null.'
        )
    kinds = set(config_json.get("layer_types") or []) - {"full_attention"}
    if kinds and not any("sliding_window" in line for line in broken):
        broken.append(f"layer_types holds {', '.join(sorted(map(str, kinds)))}: only full_attention is supported.")
    if config_json.get("quantization_config"):
        broken.append("quantization_config: quantised weights are not supported. Save the model dequantised.")
    return broken


def json_of_shape(shape: LlamaConfig, *, dtype: str) -> dict[str, Any]:
    """A `config.json` from which transformers builds the same model.

    Args:
        shape: theta, scaling and positions are those to write.
        dtype: of the weights, as in "float32".
    Raises:
        ValueError: no family computes this shape.
    """
    name = _family_of(shape)
    rope = shape.rope_scaling.to_hugging_face(
        theta=shape.rope_theta, head_width=shape.head_width, max_positions=shape.max_positions
    )
    parameters = dict(rope["rope_parameters"])
    written: dict[str, Any] = {
        "architectures": [
            {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}.get(name, f"{name.title()}ForCausalLM")
        ],
        "model_type": name,
        **{theirs: getattr(shape, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": dtype,
        **rope,
        # The form that transformers before 5 and other programs read.
        "rope_theta": parameters.pop("rope_theta"),
        "rope_scaling": parameters if parameters["rope_type"] != "default" else None,
    }
    if name in ("llama", "qwen3"):
        written["attention_bias"] = shape.attention_bias
    if name == "llama":
        written["mlp_bias"] = shape.mlp_bias
    if name in ("qwen2", "qwen3"):
        written |= {"use_sliding_window": False, "max_window_layers": shape.layers}
    return {**written, "sliding_window": None} if name != "llama" else written


def _family_of(shape: LlamaConfig) -> str:
    """The `model_type` that computes a shape."""
    flags = {
        "attention_bias": shape.attention_bias,
        "attention_output_bias": shape.attention_output_bias,
        "mlp_bias": shape.mlp_bias,
        "qk_norm": shape.qk_norm,
    }
    whole_heads = shape.width % shape.heads == 0
    share = shape.rope_scaling.partial_rotary_factor
    if share is not None and share != 1:
        raise ValueError(
            f"partial_rotary_factor={share!r}: no Llama, Mistral or Qwen of transformers turns a part of each head, so "
            "their logits would differ."
        )
    if shape.qk_norm and shape.attention_bias == shape.attention_output_bias and not shape.mlp_bias:
        return "qwen3"
    if not shape.qk_norm and shape.attention_bias == shape.attention_output_bias and whole_heads:
        return "llama"
    if not any(flags.values()):
        return "mistral"  # a Llama whose heads need not divide its width
    if shape.attention_bias and not (shape.attention_output_bias or shape.mlp_bias or shape.qk_norm):
        return "qwen2"
    given = ", ".join(f"{flag}={is_on}" for flag, is_on in flags.items())
    raise ValueError(f"No Llama, Mistral or Qwen of transformers has {given} at {shape.heads} heads of {shape.width}.")
