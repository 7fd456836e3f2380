"""Text to token ids and back: bytes, or any tokenizer that Hugging Face saved as `tokenizer.json`.

The library `tokenizers` is loaded only when a tokenizer file is asked for.
"""

import ctypes
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

_COMMON_ANCHORS = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|startoftext|>", "<|endoftext|>")
_COMMON_ENDS = ("</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>")


@dataclass(frozen=True, kw_only=True)
class Tokenizer(ABC):
    """What every tokenizer offers. `encode_batch` adds no special tokens: packing places them."""

    vocabulary_size: int
    """Ids are below this number."""
    anchor_id: int
    """The anchor token, normally BOS; placed by packing, never stored."""
    end_id: int | None
    """Ends each document and belongs to it; None for no such token."""
    digest: str
    """Hash of the tokenizer's content and of the ids above: equal digests make equal tokens of one `library`."""
    library: str = ""
    """Name and version of the code that tokenises; empty for our own, whose changes raise the token store's format."""

    @property
    def pad_id(self) -> int:
        """What stands in padding. Any valid id would do: padding is seen by nobody and is never a target."""
        return self.anchor_id if self.end_id is None else self.end_id

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One array of ids per text, of any unsigned integer type."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`, special tokens spelled out."""


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are ids 0..255; no text can make the special ids.

    "é"  ->  [195, 169]          256 <bos>, 257 <eos>
    """

    vocabulary_size: int = 258

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        spelled = {256: b"<bos>", 257: b"<eos>"}
        return b"".join(spelled.get(int(i)) or bytes([int(i)]) for i in ids).decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class SavedTokenizer(Tokenizer):
    """A `tokenizer.json` behind the library `tokenizers`. Text that spells a special token becomes that token, as
    the library does it."""

    backend: Any
    """A `tokenizers.Tokenizer`."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(spec: str, anchor_token: str | None = None, end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer that `data.tokenizer`, `data.anchor_token` and `data.end_of_document` describe.

    Args:
        spec: `byte`, or the path of a `tokenizer.json` or of the folder that holds one. The BOS and EOS of a file
            come from `tokenizer_config.json` or `special_tokens_map.json` beside it, else from names in common use.
        anchor_token: text of the anchor token; None is the tokenizer's BOS.
        end_of_document: text of the token that ends a document; None is the tokenizer's EOS, "" is none.
    Raises:
        ValueError: no such file, a file that is no tokenizer, or special tokens it does not have.
    """
    if spec == "byte":
        return _byte_tokenizer(anchor_token, end_of_document)
    file = Path(spec).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    backend, content = _read_tokenizer_file(spec, file)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    beside = _special_tokens_beside(file)
    anchors = (beside.get("bos_token"), *_COMMON_ANCHORS)
    ends = (beside.get("eos_token"), *_COMMON_ENDS)
    anchor_id, end_id = _special_ids(vocabulary, spec, anchor_token, anchors, end_of_document, ends)
    return SavedTokenizer(
        vocabulary_size=max(vocabulary.values()) + 1,  # ids may leave gaps, so not len(vocabulary)
        anchor_id=anchor_id,
        end_id=end_id,
        digest=_digest(content, anchor_id, end_id),
        library=f"tokenizers {version('tokenizers')}",
        backend=backend,
    )


def _byte_tokenizer(anchor_token: str | None, end_of_document: str | None) -> ByteTokenizer:
    ids = {"<bos>": 256, "<eos>": 257}
    anchor_id, end_id = _special_ids(ids, "byte", anchor_token, ("<bos>",), end_of_document, ("<eos>",))
    return ByteTokenizer(anchor_id=anchor_id, end_id=end_id, digest=_digest(b"byte", anchor_id, end_id))


def _digest(content: bytes, anchor_id: int, end_id: int | None) -> str:
    return hashlib.sha256(content + json.dumps([anchor_id, end_id]).encode()).hexdigest()


def _read_tokenizer_file(spec: str, file: Path) -> tuple[Any, bytes]:
    import tokenizers

    # The library warns at every fork (data workers) unless this is set; the workers themselves never tokenise.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"data.tokenizer={spec!r}: cannot read {file} ({error.strerror}). Set data.tokenizer=byte, or the path of "
            "a tokenizer.json (a tokenizer of the hub becomes one by `tokenizer.save_pretrained(FOLDER)`)."
        ) from error
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"data.tokenizer={spec!r}: {file} is no tokenizer ({error}). Set data.tokenizer=byte, or the path of a "
            "tokenizer.json that the library tokenizers saved."
        ) from error
    backend.no_truncation()  # a saved file may carry both, and either would change documents silently
    backend.no_padding()
    give_back_freed_memory()
    return backend, content


def give_back_freed_memory() -> None:
    """Parsing a vocabulary of 128k leaves 100 MB freed that the C library would keep, in every process that does it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others have none
    if trim is not None:
        trim(0)


def _special_tokens_beside(file: Path) -> dict[str, str]:
    """`bos_token` and `eos_token` of the two files that transformers saves beside `tokenizer.json`."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = file.parent / name
        if not path.is_file():
            continue
        try:
            entries = json.loads(path.read_bytes())
            for key in ("bos_token", "eos_token"):
                token = entries.get(key)
                token = token.get("content") if isinstance(token, dict) else token
                if isinstance(token, str):
                    found[key] = token
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"data.tokenizer: {path} is no JSON object ({error}). Mend or remove that file."
            ) from error
    return found


def _special_ids(
    vocabulary: dict[str, int],
    spec: str,
    anchor_token: str | None,
    anchors: Sequence[str | None],
    end_of_document: str | None,
    ends: Sequence[str | None],
) -> tuple[int, int | None]:
    """Ids of anchor and end of document: of the token asked for, else of the first candidate there is."""
    anchor_id = _special_id(vocabulary, spec, "anchor_token", anchor_token, anchors)
    if end_of_document == "":
        return anchor_id, None
    return anchor_id, _special_id(vocabulary, spec, "end_of_document", end_of_document, ends)


def _special_id(
    vocabulary: dict[str, int], spec: str, setting: str, asked: str | None, candidates: Sequence[str | None]
) -> int:
    for token in candidates if asked is None else [asked]:
        if token in vocabulary:
            return vocabulary[token]
    likely = [token for token in vocabulary if token[:1] + token[-1:] in ("<>", "[]")][:8]
    what = "has no token of its own for it" if asked is None else f"does not know {asked!r}"
    remedy = ' or "" for none' if setting == "end_of_document" else ""
    raise ValueError(
        f"data.{setting}: the tokenizer data.tokenizer={spec!r} {what}. Set data.{setting} to the text of one of its "
        f"tokens{remedy}" + (f"; it has {', '.join(likely)}." if likely else ".")
    )
