"""The tokenizer files of a checkpoint that we write, such that transformers' AutoTokenizer does what training did.

    tokenizer.json          vocabulary, merges, and whether a BOS is put in front
    tokenizer_config.json   which tokens are BOS, EOS and padding

Whether a BOS is added stands in both files: the fast tokenizers act on the first, other programs read the second.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modules.hf_weights import write_json_object

BYTE_SPECIALS = ("<bos>", "<eos>")
"""Ids 256 and 257 of the byte tokenizer."""


def write_tokenizer_files(
    folder: Path,
    tokenizer: dict[str, Any],
    *,
    bos: str,
    eos: str | None,
    adds_bos: bool,
    max_positions: int,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes both files.

    Args:
        folder: the checkpoint's.
        tokenizer: a `tokenizer.json`'s object; what it did about special tokens is replaced.
        bos: text of the BOS, one of its tokens.
        eos: text of the EOS; None for none.
        adds_bos: whether encoding puts the BOS in front.
        max_positions: positions of the model.
        extra: more keys of `tokenizer_config.json`.
    """
    write_json_object(
        folder / "tokenizer.json", {**tokenizer, "post_processor": _bos_in_front(tokenizer, bos, adds_bos)}
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "add_bos_token": adds_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        **(extra or {}),
    }
    write_json_object(folder / "tokenizer_config.json", {key: x for key, x in config.items() if x is not None})


def _bos_in_front(tokenizer: dict[str, Any], bos: str, adds_bos: bool) -> dict[str, Any] | None:
    if not adds_bos:
        return None
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    vocabulary = tokenizer["model"].get("vocab")
    bos_id = ids[bos] if bos in ids else vocabulary[bos]
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    mark = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [mark, first],
        "pair": [mark, first, mark, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def byte_tokenizer() -> dict[str, Any]:
    """A `tokenizer.json` of the byte tokenizer: the same 258 ids, byte-level BPE without a merge."""
    import tokenizers

    letters = _letters_of_bytes()
    vocabulary = {letters[byte]: byte for byte in range(256)}
    vocabulary |= {token: 256 + index for index, token in enumerate(BYTE_SPECIALS)}
    return bpe_tokenizer(vocabulary, [], special=list(BYTE_SPECIALS), split=[byte_level(tokenizers)])


def byte_level(tokenizers: Any, *, use_regex: bool = False) -> Any:
    """Bytes as letters, and with the expression of GPT-2 words apart."""
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def bpe_tokenizer(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    special: list[str],
    split: list[Any],
    whole: Sequence[str] = (),
) -> dict[str, Any]:
    """A `tokenizer.json` of byte-level BPE.

    Args:
        vocabulary: tokens in the letters of bytes, special ones as they are, and their ids.
        merges: in the order of their rank.
        special: tokens that text spells out whole and decoding may leave out.
        split: pre-tokenizers, in order.
        whole: tokens that text spells out whole too, and decoding keeps.
    """
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(split)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in whole])
    return json.loads(backend.to_str())


def _letters_of_bytes() -> list[str]:
    """GPT-2's letter for each byte: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
