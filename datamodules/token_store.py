"""Documents as tokens on disk: tokenised once, then read through the page cache by every run and worker.

    <home>/tokens/<key>/tokens.bin    all documents end to end, little-endian uint16 or uint32
                        ends.bin      int64, where each document ends in tokens.bin
                        sources.bin   uint16, which of the header's sources each document is of
                        header.json   counts, types, and what the key was made of

The key hashes content, the settings that choose from it, tokenizer and this format, and nothing of how rows are made:
a sweep over context lengths tokenises once, and a changed tokenizer never meets old ids.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from datamodules.tokenizers import Tokenizer

FORMAT = 2
"""Raised whenever a store written before would be read differently, or other tokens would be written today."""
OWN = ""
"""In a header: documents that name no source, which are of the store's own."""
HEADER, TOKENS, ENDS, SOURCES = "header.json", "tokens.bin", "ends.bin", "sources.bin"


@dataclass(frozen=True, kw_only=True)
class StoreHeader:
    """What a store holds and came from."""

    format: int
    documents: int
    tokens: int
    dtype: str
    vocabulary_size: int
    tokenizer_digest: str
    end_id: int | None
    source_key: list[str | int | None]
    """What the documents depend on, see `Source.key`."""
    sources: list[str]
    """Names that documents give for their source; OWN for none."""
    empty_documents: int
    """Left out, having no text or no token."""
    undecodable_documents: int
    """Left out, their bytes being in no known encoding."""
    removed_anchors: int
    """Documents of ready-made ids that began with the anchor token, which packing places and so was taken off."""


class TokenStore:
    """A whole, read-only store. Pickles as its path, so a worker process maps the same pages.

    Attributes:
        tokens: memory-mapped ids of all documents end to end, uint16 or uint32 [tokens].
        ends: memory-mapped int64 [documents], where each document ends; document i is tokens[ends[i-1]:ends[i]].
        sources: memory-mapped uint16 [documents], index into `header.sources`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.header = StoreHeader(**json.loads((directory / HEADER).read_text()))
        self.tokens = np.memmap(directory / TOKENS, self.header.dtype, "r", shape=(self.header.tokens,))
        self.ends = np.memmap(directory / ENDS, "<i8", "r", shape=(self.header.documents,))
        self.sources = np.memmap(directory / SOURCES, "<u2", "r", shape=(self.header.documents,))

    def __reduce__(self) -> tuple[type["TokenStore"], tuple[Path]]:
        return TokenStore, (self.directory,)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, its end token included: int64 [documents], each >= 1."""
        return np.diff(np.asarray(self.ends), prepend=0)

    @classmethod
    def open_whole(cls, directory: Path) -> "TokenStore | None":
        """None for a store that is missing or, after a crash of the machine, not all there."""
        try:
            return cls(directory)
        except (OSError, ValueError, TypeError):
            return None


def token_type(tokenizer: Tokenizer) -> np.dtype:
    """The narrowest type that holds all ids."""
    return np.dtype("<u2") if tokenizer.vocabulary_size <= 1 << 16 else np.dtype("<u4")


def store_directory(home: Path, source_key: list[str | int | None], tokenizer: Tokenizer) -> Path:
    """Where the store of a source and a tokenizer is, or will be."""
    made_of = [FORMAT, source_key, tokenizer.digest, tokenizer.library]
    return home / "tokens" / hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:24]


def write_header(directory: Path, header: StoreHeader) -> None:
    """The last file of a store: without it there is none."""
    (directory / HEADER).write_text(json.dumps(asdict(header), indent=2) + "\n")
