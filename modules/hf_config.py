"""`config.json` of a Hugging Face checkpoint, read as a shape of ours and written from one.

    model_type   biases of q, k, v   of the output   of the SwiGLU   norm of q and k
    llama        attention_bias      the same        mlp_bias        no
    mistral      no                  no              no              no
    qwen2        yes                 no              no              no
    qwen3        attention_bias      the same        no              yes

Source: the configuration and modeling files of these four in Hugging Face's transformers 5.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from modules.llama import LlamaConfig
from modules.rotary_scaling import ScalingConfig

CONFIG_FILE = "config.json"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DEFAULT_THETA = 10_000.0


def read_shape(directory: Path) -> LlamaConfig:
    """The shape that a checkpoint directory's `config.json` describes.

    Raises:
        ValueError: no such file, no JSON, another architecture, something that we would compute otherwise (a sliding
            window, another activation, quantised weights), or a missing or broken value; names file and key.
    """
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise ValueError(f"{directory}: is no checkpoint directory.")
    try:
        given = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}). A checkpoint directory holds one.") from error
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}.") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path}: must hold one JSON object.")
    try:
        return _shape(given)
    except ValueError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error


def shape_as_json(
    shape: LlamaConfig,
    *,
    theta: float,
    scaling: ScalingConfig,
    dtype: torch.dtype,
    bos_id: int | None,
    end_id: int | None,
) -> dict[str, Any]:
    """The `config.json` that makes transformers compute what the model computes.

    Args:
        shape: of the weights.
        theta: base of the frequencies in use, `Llama.theta`.
        scaling: in use, `Llama.scaling`.
        dtype: of the weights.
        bos_id: beginning of sequence, None for no such token.
        end_id: end of sequence, None for no such token.
    Raises:
        ValueError: no architecture of transformers' has this combination.
    """
    kind = _model_type(shape)
    if scaling.turning_width(shape.head_width) != shape.head_width:
        raise ValueError(
            f"partial_rotary_factor={scaling.partial_rotary_factor}: transformers' {ARCHITECTURES[kind]} turns whole "
            "heads, so it would compute something else. This model cannot be exported."
        )
    written = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": shape.vocabulary_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_dropout": 0.0,
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": bos_id,
        "eos_token_id": end_id,
        **scaling.to_hugging_face(theta=theta, head_width=shape.head_width, max_positions=shape.max_positions),
    }
    if kind in ("llama", "qwen3"):
        written["attention_bias"] = shape.attention_bias
    if kind == "llama":
        written["mlp_bias"] = shape.mlp_bias
    if kind.startswith("qwen"):
        written |= {"use_sliding_window": False, "sliding_window": None}
    return written


def _model_type(shape: LlamaConfig) -> str:
    biases = (shape.attention_bias, shape.attention_output_bias, shape.mlp_bias)
    if shape.qk_norm and biases in ((False, False, False), (True, True, False)):
        return "qwen3"
    if not shape.qk_norm and biases == (True, False, False):
        return "qwen2"
    if not shape.qk_norm and shape.attention_bias == shape.attention_output_bias:
        return "llama"
    raise ValueError(
        f"attention_bias={biases[0]}, attention_output_bias={biases[1]}, mlp_bias={biases[2]}, "
        f"qk_norm={shape.qk_norm}: no architecture of transformers' has this combination, so the model cannot be "
        "exported."
    )


def _shape(given: Mapping[str, Any]) -> LlamaConfig:
    kind = given.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type={kind!r} is none of {', '.join(ARCHITECTURES)}, which are what can be read.")
    broken = [*_foreign(kind, given)]

    def number(key: str, default: int | None = None) -> int:
        value = given.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            broken.append(f"{key}={value!r} must be a whole number, at least 1.")
            return 1
        return value

    def flag(key: str) -> bool:
        value = given.get(key, False)
        if not isinstance(value, bool):
            broken.append(f"{key}={value!r} must be true or false.")
        return bool(value)

    width, heads = number("hidden_size"), number("num_attention_heads")
    if given.get("head_dim") is None and width % heads:
        broken.append(f"hidden_size={width} is no multiple of num_attention_heads={heads}, and head_dim is not given.")
    epsilon = given.get("rms_norm_eps", 1e-6)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float):
        broken.append(f"rms_norm_eps={epsilon!r} must be a number.")
        epsilon = 1e-6
    scaling, theta = ScalingConfig(rope_type="default"), None
    try:
        scaling, theta = ScalingConfig.of_hugging_face(given)
    except ValueError as error:
        broken += str(error).splitlines()
    has_attention_bias = kind == "qwen2" or (kind in ("llama", "qwen3") and flag("attention_bias"))
    sizes: dict[str, Any] = {
        "vocabulary_size": number("vocab_size"),
        "width": width,
        "layers": number("num_hidden_layers"),
        "heads": heads,
        "kv_heads": number("num_key_value_heads", heads if kind == "llama" else None),
        "head_width": number("head_dim", max(width // heads, 1)),
        "hidden_width": number("intermediate_size"),
        "max_positions": number("max_position_embeddings"),
    }
    flags: dict[str, Any] = {
        "tied_embeddings": flag("tie_word_embeddings"),
        "attention_bias": has_attention_bias,
        "attention_output_bias": has_attention_bias and kind != "qwen2",
        "mlp_bias": kind == "llama" and flag("mlp_bias"),
        "qk_norm": kind == "qwen3",
    }
    if broken:
        raise ValueError("\n".join(broken))
    return LlamaConfig(
        **sizes, **flags, norm_epsilon=float(epsilon), rope_theta=theta or _DEFAULT_THETA, rope_scaling=scaling
    )


def _foreign(kind: str, given: Mapping[str, Any]) -> list[str]:
    """What would make transformers compute something that we do not."""
    broken = []
    architectures = given.get("architectures")
    if architectures and architectures != [ARCHITECTURES[kind]]:
        broken.append(f"architectures={architectures!r}: only {ARCHITECTURES[kind]} can be read.")
    if (activation := given.get("hidden_act", "silu")) != "silu":
        broken.append(f"hidden_act={activation!r} is not known, only silu.")
    window = given.get("sliding_window")
    is_active = kind == "mistral" or bool(given.get("use_sliding_window"))
    positions = given.get("max_position_embeddings")
    reaches = isinstance(window, int) and isinstance(positions, int) and window >= positions
    if window is not None and is_active and not reaches:
        broken.append(
            f"sliding_window={window!r}: these weights were trained to see that many tokens back, and our strategies "
            "are settings of the run. Set sliding_window to null there for rows that are no longer, where it changes "
            "nothing; for longer ones also set attention.strategy=sliding_window and attention.window."
        )
    layer_types = given.get("layer_types") or []
    if window is None or not is_active:
        foreign = sorted({str(name) for name in layer_types if name != "full_attention"})
        if foreign:
            broken.append(f"layer_types holds {', '.join(foreign)}: only full_attention can be read.")
    if given.get("quantization_config"):
        broken.append("quantization_config: quantised weights cannot be read. Save the model in bfloat16 or float32.")
    return broken
