"""The tokenizer of a GGUF file as a `tokenizer.json`: byte-level BPE, as GPT-2 and SmolLM split text.

    "x = 2024"   smollm  ->  x | Ġ= | Ġ | 2 | 0 | 2 | 4        digits alone, then GPT-2's expression
                 gpt-2   ->  x | Ġ= | Ġ2024                    and merges inside each piece

Source: `llm_tokenizer_bpe` and the kinds of tokens in llama.cpp's llama-vocab.cpp; HuggingFaceTB/SmolLM2's own
tokenizer.json for smollm.
"""

from dataclasses import dataclass
from typing import Any

from workbench.gguf_file import GgufFile
from workbench.tokenizer_files import bpe_tokenizer, byte_level

_SPLITS = ("smollm", "gpt-2")
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Kinds of tokens that text spells whole, without merges; decoding may leave out the first two."""


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """What a model does with its tokens, apart from making them of text."""

    tokens: list[str]
    bos_id: int
    eos_id: int | None
    unknown_id: int | None
    padding_id: int | None
    adds_bos: bool
    chat_template: str | None

    @property
    def vocabulary_size(self) -> int:
        return len(self.tokens)

    def text(self, token_id: int) -> str:
        return self.tokens[token_id]


def read_tokenizer(gguf: GgufFile) -> tuple[dict[str, Any], SpecialTokens]:
    """(`tokenizer.json`, special tokens).

    Raises:
        ValueError: a tokenizer of another kind, or one whose parts do not fit together.
    """
    import tokenizers

    kind, split = gguf.get("tokenizer.ggml.model", str), gguf.get("tokenizer.ggml.pre", str)
    if kind != "gpt2" or split not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={split!r} is not supported: only gpt2 with "
            f"{' or '.join(_SPLITS)}."
        )
    special = _special_tokens(gguf)
    vocabulary = {token: number for number, token in enumerate(special.tokens)}
    if len(vocabulary) != len(special.tokens):
        twice = [token for number, token in enumerate(special.tokens) if vocabulary[token] != number]
        raise ValueError(f"tokenizer.ggml.tokens holds {len(twice)} texts twice, such as {twice[0]!r}.")
    types = gguf.get("tokenizer.ggml.token_type", list)
    if types is not None and len(types) != len(special.tokens):
        raise ValueError(f"tokenizer.ggml.token_type tells {len(types)} of {len(special.tokens)} tokens' kinds.")
    named = {special.bos_id, special.eos_id, special.unknown_id, special.padding_id}
    kinds = {number: _CONTROL for number in named if number is not None}
    kinds = {number: kind for number, kind in enumerate(types or [])} | kinds
    digits = [tokenizers.pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    return bpe_tokenizer(
        vocabulary,
        _merges(gguf, vocabulary),
        special=[t for number, t in enumerate(special.tokens) if kinds.get(number) in (_UNKNOWN, _CONTROL)],
        whole=[t for number, t in enumerate(special.tokens) if kinds.get(number) == _USER_DEFINED],
        split=[*digits, byte_level(tokenizers, use_regex=True)],
    ), special


def _special_tokens(gguf: GgufFile) -> SpecialTokens:
    tokens = gguf.need("tokenizer.ggml.tokens", list)
    names = ("bos", "eos", "unknown", "padding")
    ids = {name: gguf.get(f"tokenizer.ggml.{name}_token_id", int) for name in names}
    odd = [f"{name}={number}" for name, number in ids.items() if number is not None and not 0 <= number < len(tokens)]
    if odd:
        raise ValueError(f"special tokens that the vocabulary does not have: {', '.join(odd)}.")
    if ids["bos"] is None:
        raise ValueError("tokenizer.ggml.bos_token_id is missing.")
    if gguf.get("tokenizer.ggml.add_eos_token", bool):
        raise ValueError("tokenizer.ggml.add_eos_token=True is not supported: an EOS after each text would be lost.")
    return SpecialTokens(
        tokens=tokens,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unknown_id=ids["unknown"],
        padding_id=ids["padding"],
        adds_bos=bool(gguf.get("tokenizer.ggml.add_bos_token", bool)),
        chat_template=gguf.get("tokenizer.chat_template", str),
    )


def _merges(gguf: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in the order of their rank; both parts and their union must be tokens."""
    merges = gguf.need("tokenizer.ggml.merges", list)
    pairs = [tuple(str(merge).split(" ")) for merge in merges]
    odd = [
        merge
        for merge, pair in zip(merges, pairs, strict=True)
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys()
    ]
    if odd:
        raise ValueError(f"tokenizer.ggml.merges holds {len(odd)} merges of texts that are no tokens: {odd[0]!r}.")
    return [(pair[0], pair[1]) for pair in pairs]
