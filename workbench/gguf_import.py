"""A GGUF file of llama.cpp as a checkpoint directory: `workbench import-gguf FILE DIR`.

    blk.0.attn_q.weight, quantised, rows of each head in pairs   ->   model.layers.0.self_attn.q_proj.weight, float32

llama.cpp rotates neighbours (0, 1), (2, 3), ... of a head; transformers and we rotate (0, D/2), (1, D/2 + 1), ... . Its
converter orders the rows of q and k accordingly, and this is undone here.

Source: the format's page, github.com/ggml-org/ggml/blob/master/docs/gguf.md; `permute` and the names of tensors in
llama.cpp's convert_hf_to_gguf.py; the splitting of text in its llama-vocab.cpp.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modules.attention.strategies import STRATEGIES
from modules.hf_weights import new_folder, write_checkpoint
from modules.llama import Llama, LlamaConfig
from modules.rotary import RotaryConfig
from workbench.errors import UserError, user_input
from workbench.tokenizer_files import bpe_tokenizer, byte_level, write_tokenizer_files

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
_SPLITS = ("smollm", "gpt-2")
_CONTROL = 3
"""Type of a token that text cannot spell by accident, such as BOS."""


def import_gguf(file: Path, directory: Path) -> None:
    """Writes a checkpoint directory: float32 weights, `config.json` and the tokenizer.

    Raises:
        UserError: no GGUF, another architecture, or something in it that would be lost.
    """
    try:
        import gguf
    except ImportError as error:
        raise UserError("reading GGUF needs the package gguf. Run `pip install 'workbench[gguf]'`.") from error
    if not file.is_file():
        raise UserError(f"{file}: there is no such file.")
    try:
        reader = gguf.GGUFReader(file)
    except Exception as error:  # numpy's, struct's and the package's own kinds, for a broken or foreign file
        raise UserError(f"{file}: is no whole GGUF file: {error}.") from error
    settings = {name: field for name, field in reader.fields.items()}
    with user_input(str(file)):
        shape = _shape(settings, reader.tensors)
        tokenizer, special = _tokenizer(settings)
        if len(tokenizer["model"]["vocab"]) > shape.vocabulary_size:
            raise ValueError("the tokenizer has more tokens than the embedding has rows.")
        model = _model(shape, reader.tensors, gguf.quants.dequantize)
    with user_input(), new_folder(directory) as folder:
        write_checkpoint(model, folder, extra={f"{name}_token_id": special.get(name) for name in ("bos", "eos")})
        tokens = settings["tokenizer.ggml.tokens"].contents()
        texts = {name: tokens[number] for name, number in special.items()}
        write_tokenizer_files(
            folder,
            tokenizer,
            bos=texts["bos"],
            eos=texts.get("eos"),
            adds_bos=bool(_get(settings, "tokenizer.ggml.add_bos_token", False)),
            max_positions=shape.max_positions,
            extra={
                "unk_token": texts.get("unknown"),
                "pad_token": texts.get("padding"),
                "chat_template": _get(settings, "tokenizer.chat_template"),
            },
        )


def _shape(settings: dict[str, Any], tensors: list[Any]) -> LlamaConfig:
    """Raises ValueError for another architecture and for settings that change what is computed."""
    if (found := _get(settings, "general.architecture")) != "llama":
        raise ValueError(f"general.architecture={found!r} is not supported, only llama.")

    def value(key: str, default: Any = None) -> Any:
        found = _get(settings, f"llama.{key}", default)
        if found is None:
            raise ValueError(f"llama.{key} is missing.")
        return found

    scaling = _get(settings, "llama.rope.scaling.type", "none")
    if scaling != "none" or _get(settings, "llama.rope.scale_linear", 1.0) != 1.0:
        raise ValueError(f"llama.rope.scaling.type={scaling!r} is not supported. Set it in config.json by hand.")
    width, heads = value("embedding_length"), value("attention.head_count")
    head_width = value("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if value(key, head_width) != head_width:
            raise ValueError(f"llama.{key}={value(key)} differs from a head's width of {head_width}: not supported.")
    by_name = {tensor.name: tensor for tensor in tensors}
    if "token_embd.weight" not in by_name:
        raise ValueError("token_embd.weight is missing.")
    return LlamaConfig(
        vocabulary_size=int(by_name["token_embd.weight"].shape[1]),
        width=width,
        layers=value("block_count"),
        heads=heads,
        kv_heads=value("attention.head_count_kv", heads),
        head_width=head_width,
        hidden_width=value("feed_forward_length"),
        norm_epsilon=_shortest(value("attention.layer_norm_rms_epsilon")),
        tied_embeddings="output.weight" not in by_name,
        rope_theta=_shortest(value("rope.freq_base", 10_000.0)),
        max_positions=value("context_length"),
        attention_bias="blk.0.attn_q.bias" in by_name,
        attention_output_bias="blk.0.attn_output.bias" in by_name,
        mlp_bias="blk.0.ffn_down.bias" in by_name,
    )


@torch.no_grad()
def _model(shape: LlamaConfig, tensors: list[Any], dequantize: Any) -> Llama:
    """Raises ValueError listing tensors that are missing, unexpected or of another shape."""
    with torch.device("meta"):
        model = Llama(shape, strategy=STRATEGIES["full"], kernel="reference", rotary=RotaryConfig())
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    there = {_our_name(t.name): t for t in tensors}
    broken = [f"missing: {name}" for name in wanted if name not in there]
    broken += [f"unexpected: {tensor.name}" for name, tensor in there.items() if name not in wanted]
    broken += [
        f"of another shape: {tensor.name} is {tensor.shape[::-1].tolist()}, not {list(wanted[name])}"
        for name, tensor in there.items()
        if name in wanted and tuple(tensor.shape[::-1].tolist()) != wanted[name]
    ]
    if broken:
        raise ValueError(f"the weights do not fit its settings, in {len(broken)} tensors:\n  " + "\n  ".join(broken))
    for name in wanted:
        value = np.array(dequantize(there[name].data, there[name].tensor_type), np.float32)  # a copy, off the file
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


def _tokenizer(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """(`tokenizer.json`, ids of bos, eos, unknown and padding as far as there are any)."""
    import tokenizers

    kind, split = (_get(settings, f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != "gpt2" or split not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={split!r} is not supported: only gpt2 with "
            f"{' or '.join(_SPLITS)}."
        )
    tokens, types, merges = (_get(settings, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    if tokens is None or merges is None:
        raise ValueError("tokenizer.ggml.tokens or tokenizer.ggml.merges is missing.")
    names = {name: _get(settings, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    special = {name: int(number) for name, number in names.items() if number is not None}
    if odd := [f"{name}={number}" for name, number in special.items() if not 0 <= number < len(tokens)]:
        raise ValueError(f"special tokens that the vocabulary does not have: {', '.join(odd)}.")
    if "bos" not in special:
        raise ValueError("tokenizer.ggml.bos_token_id is missing.")
    digits = [tokenizers.pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    return bpe_tokenizer(
        {token: number for number, token in enumerate(tokens)},
        [tuple(merge.split(" ", 1)) for merge in merges],
        special=[token for token, type_ in zip(tokens, types or [], strict=False) if type_ == _CONTROL],
        split=[*digits, byte_level(tokenizers, use_regex=True)],
    ), special


def _get(settings: dict[str, Any], key: str, default: Any = None) -> Any:
    return settings[key].contents() if key in settings else default


def _shortest(stored: float) -> float:
    """The decimal number meant by a float32: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(stored)))
