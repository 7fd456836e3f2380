"""A GGUF file of llama.cpp as a checkpoint directory: `workbench import-gguf FILE DIR`.

    blk.0.attn_q.weight, quantised, rows of each head in pairs   ->   model.layers.0.self_attn.q_proj.weight, float32

llama.cpp rotates neighbours (0, 1), (2, 3), ... of a head; transformers and we rotate (0, D/2), (1, D/2 + 1), ... . Its
converter orders the rows of q and k accordingly, and this is undone here.

Source: the format's page, github.com/ggml-org/ggml/blob/master/docs/gguf.md; `permute` and the names of tensors in
llama.cpp's convert_hf_to_gguf.py; the splitting of text in `workbench/gguf_tokenizer.py`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modules.attention.strategies import STRATEGIES
from modules.hf_weights import check_new_folder, new_folder, write_checkpoint
from modules.llama import Llama, LlamaConfig
from modules.rotary import RotaryConfig
from workbench.errors import user_input
from workbench.gguf_file import GgufFile
from workbench.gguf_tokenizer import SpecialTokens, read_tokenizer
from workbench.tokenizer_files import write_tokenizer_files

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_READ = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "vocab_size",
)  # fmt: skip
_NEUTRAL: dict[str, Any] = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "attention.causal": True,
    "expert_used_count": 0,
}
"""Further settings, and the values under which they do nothing. So does any setting that is 0, false or empty."""


def import_gguf(file: Path, directory: Path) -> None:
    """Writes a checkpoint directory: float32 weights, `config.json` and the tokenizer.

    Raises:
        UserError: no GGUF, another architecture, something in it that would be lost, or a folder that holds something.
    """
    with user_input():
        check_new_folder(directory)
    gguf = GgufFile(file)
    with user_input(str(file)):
        shape = _shape(gguf)
        tokenizer, special = read_tokenizer(gguf)
        if special.vocabulary_size > shape.vocabulary_size:
            raise ValueError(
                f"the tokenizer has {special.vocabulary_size} tokens, and the embedding {shape.vocabulary_size} rows."
            )
        model = _model(shape, gguf)
    with user_input(), new_folder(directory) as folder:
        write_checkpoint(model, folder, extra={"bos_token_id": special.bos_id, "eos_token_id": special.eos_id})
        _write_tokenizer(folder, tokenizer, special, shape.max_positions)


def _write_tokenizer(folder: Path, tokenizer: dict[str, Any], special: SpecialTokens, max_positions: int) -> None:
    write_tokenizer_files(
        folder,
        tokenizer,
        bos=special.text(special.bos_id),
        eos=None if special.eos_id is None else special.text(special.eos_id),
        adds_bos=special.adds_bos,
        max_positions=max_positions,
        extra={
            "unk_token": None if special.unknown_id is None else special.text(special.unknown_id),
            "pad_token": None if special.padding_id is None else special.text(special.padding_id),
            "chat_template": special.chat_template,
        },
    )


def _shape(gguf: GgufFile) -> LlamaConfig:
    """Raises ValueError for another architecture and for settings that change what is computed."""
    if (found := gguf.need("general.architecture", str)) != "llama":
        raise ValueError(f"general.architecture={found!r} is not supported, only llama.")
    if (parts := gguf.raw("split.count") or 1) != 1:
        raise ValueError(f"is one of {parts} parts. Join them first: `llama-gguf-split --merge FIRST_PART WHOLE`.")
    _refuse_what_is_not_read(gguf)

    def size(key: str, default: int | None = None) -> int:
        name = f"llama.{key}"
        value = gguf.need(name, int) if default is None or gguf.raw(name) is not None else default
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
        return value

    width, heads = size("embedding_length"), size("attention.head_count")
    head_width = size("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if size(key, head_width) != head_width:
            raise ValueError(f"llama.{key}={size(key)} differs from a head's width of {head_width}: not supported.")
    if "token_embd.weight" not in gguf.shapes:
        raise ValueError("token_embd.weight is missing.")
    theta = gguf.get("llama.rope.freq_base", float)
    return LlamaConfig(
        vocabulary_size=gguf.shapes["token_embd.weight"][0],
        width=width,
        layers=size("block_count"),
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_width=head_width,
        hidden_width=size("feed_forward_length"),
        norm_epsilon=_shortest(gguf.need("llama.attention.layer_norm_rms_epsilon", float)),
        tied_embeddings="output.weight" not in gguf.shapes,
        rope_theta=10_000.0 if theta is None else _shortest(theta),
        max_positions=size("context_length"),
        attention_bias="blk.0.attn_q.bias" in gguf.shapes,
        attention_output_bias="blk.0.attn_output.bias" in gguf.shapes,
        mlp_bias="blk.0.ffn_down.bias" in gguf.shapes,
    )


def _refuse_what_is_not_read(gguf: GgufFile) -> None:
    """A window, experts, another scale of the scores, a stretched rotation: any of them, ignored, is another model."""
    odd = [
        f"{key}={value!r}"
        for key in gguf.keys("llama.")
        if (name := key.removeprefix("llama.")) not in _READ
        and (value := gguf.raw(key))
        and value != _NEUTRAL.get(name)
    ]
    if gguf.raw("llama.attention.causal") is False:
        odd.append("llama.attention.causal=False")
    if odd:
        raise ValueError(
            f"{', '.join(odd)}: not supported, and to ignore it might be to compute something else. Start from the "
            "model's Hugging Face checkpoint directory."
        )


@torch.no_grad()
def _model(shape: LlamaConfig, gguf: GgufFile) -> Llama:
    """Raises ValueError listing tensors that are missing, unexpected or of another shape."""
    with torch.device("meta"):
        model = Llama(shape, strategy=STRATEGIES["full"], kernel="reference", rotary=RotaryConfig())
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    there = {_our_name(name): name for name in gguf.shapes}
    broken = [f"missing: {name}" for name in wanted if name not in there]
    broken += [f"unexpected: {theirs}" for name, theirs in there.items() if name not in wanted]
    broken += [
        f"of another shape: {theirs} is {list(gguf.shapes[theirs])}, not {list(wanted[name])}"
        for name, theirs in there.items()
        if name in wanted and gguf.shapes[theirs] != wanted[name]
    ]
    if broken:
        raise ValueError(f"the weights do not fit its settings, in {len(broken)} tensors:\n  " + "\n  ".join(broken))
    gguf.check_formats()
    for name in wanted:
        value = gguf.float32(there[name])
        if ".q_proj." in name or ".k_proj." in name:
            value = _halves(value, shape.heads if ".q_proj." in name else shape.kv_heads)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(torch.from_numpy(value)))
    return model


def _our_name(name: str) -> str:
    """blk.3.ffn_up.weight -> layers.3.mlp.up_proj.weight. An unknown name stays as it is."""
    *front, kind, last = name.split(".")
    if kind not in _NAMES or front[:1] not in ([], ["blk"]):
        return name
    return ".".join([*(["layers", *front[1:]] if front else []), _NAMES[kind], last])


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in pairs, 0 h 1 h+1 ..., back to halves, 0 1 ... h h+1 ... ."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows.shape))


def _shortest(stored: float) -> float:
    """The decimal number meant by a float32: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(stored)))
