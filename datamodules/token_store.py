"""Documents as tokens on disk: tokenised once, then read through the page cache by every run and worker.

    <home>/tokens/<key>/tokens.bin    all documents end to end, little-endian uint16 or uint32
                        ends.bin      int64, where each document ends in tokens.bin
                        header.json   counts, types, and what the key was made of

The key hashes corpus content, text field, tokenizer and this format, and nothing of how rows are made: a sweep over
context lengths tokenises once.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from filelock import FileLock

from datamodules.config import DataConfig
from datamodules.documents import CorpusCount, corpus_digest, read_documents
from datamodules.tokenizers import Tokenizer

FORMAT = 1
"""Raised whenever a store written before would be read differently."""
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 1024, 1 << 22


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
    corpus: str
    corpus_digest: str
    text_field: str
    empty_documents: int
    """Left out, having no text or no token."""
    undecodable_documents: int
    """Left out, their bytes being in no known encoding."""


class TokenStore:
    """A whole, read-only store. Pickles as its path, so a worker process maps the same pages.

    Attributes:
        tokens: memory-mapped ids of all documents end to end, uint16 or uint32 [tokens].
        ends: memory-mapped int64 [documents], where each document ends; document i is tokens[ends[i-1]:ends[i]].
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.header = StoreHeader(**json.loads((directory / "header.json").read_text()))
        self.tokens = np.memmap(directory / "tokens.bin", self.header.dtype, "r", shape=(self.header.tokens,))
        self.ends = np.memmap(directory / "ends.bin", "<i8", "r", shape=(self.header.documents,))

    def __reduce__(self) -> tuple[type["TokenStore"], tuple[Path]]:
        return TokenStore, (self.directory,)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, its end token included: int64 [documents], each >= 1."""
        return np.diff(np.asarray(self.ends), prepend=0)

    def document(self, index: int) -> np.ndarray:
        """Ids of one document."""
        return np.asarray(self.tokens)[self.ends[index] - self.lengths[index] : self.ends[index]]

    def report(self) -> dict[str, int]:
        """Counts for a run's log."""
        return {
            "documents": self.header.documents,
            "tokens": self.header.tokens,
            "empty_documents": self.header.empty_documents,
            "undecodable_documents": self.header.undecodable_documents,
        }

    @classmethod
    def find(cls, home: Path, config: DataConfig, tokenizer: Tokenizer) -> Self | None:
        """The store of these settings if it is whole already. Reads the corpus (for its hash), writes nothing.

        Raises:
            ValueError: a missing, unreadable or unknown corpus.
        """
        return cls._open_whole(_directory(home, config, tokenizer, corpus_digest(config.corpus)))

    @classmethod
    def open_or_build(
        cls,
        home: Path,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        accept: Callable[[np.ndarray], object] = lambda lengths: None,
    ) -> Self:
        """The store of these settings, tokenised first where it is missing.

        Any number of processes may ask for one store at once: one builds, the others wait for it. A failed build
        leaves nothing behind.

        Args:
            accept: given the documents' lengths (int64 [documents]) before the store is kept; raises for documents
                that nothing can be made of, and the store is not kept then.
        Raises:
            ValueError: what `read_documents` raises, a corpus without text, or what `accept` raises.
        """
        digest = corpus_digest(config.corpus)
        directory = _directory(home, config, tokenizer, digest)
        if (store := cls._open_whole(directory)) is None:
            with _locked(directory):
                if (store := cls._open_whole(directory)) is None:
                    _build(directory, config, tokenizer, digest, accept)
                    return cls(directory)
        accept(store.lengths)
        return store

    @classmethod
    def _open_whole(cls, directory: Path) -> Self | None:
        """None for a store that is missing or, after a crash of the machine, not all there."""
        try:
            return cls(directory)
        except (OSError, ValueError, TypeError):
            return None


def _directory(home: Path, config: DataConfig, tokenizer: Tokenizer, digest: str) -> Path:
    made_of = [FORMAT, digest, config.text_field, tokenizer.digest, tokenizer.end_id]
    return home / "tokens" / hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:24]


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the right to build `directory`. Leaves neither lock file nor empty folders behind."""
    made = [path for path in (directory.parent, *directory.parent.parents) if not path.exists()]
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = directory.with_suffix(".lock")
    try:
        with FileLock(lock):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)  # while held: whoever waits on this file sees that and makes a new one
    finally:
        with suppress(OSError):  # not empty: somebody uses them
            for path in made:
                path.rmdir()


def _build(
    directory: Path,
    config: DataConfig,
    tokenizer: Tokenizer,
    digest: str,
    accept: Callable[[np.ndarray], object],
) -> None:
    """Tokenises into a folder beside `directory` and renames it when whole. The caller holds the lock."""
    partial = directory.with_suffix(".partial")
    for stale in (directory, partial):  # not whole, or of a build that was killed
        shutil.rmtree(stale, ignore_errors=True)
    partial.mkdir()
    try:
        header = _write(partial, config, tokenizer, digest)
        (partial / "header.json").write_text(json.dumps(asdict(header), indent=2) + "\n")
        accept(TokenStore(partial).lengths)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(folder: Path, config: DataConfig, tokenizer: Tokenizer, digest: str) -> StoreHeader:
    dtype = np.dtype("<u2") if tokenizer.vocabulary_size <= 1 << 16 else np.dtype("<u4")
    end = np.array([] if tokenizer.end_id is None else [tokenizer.end_id], dtype)
    count = CorpusCount()
    documents = tokens = wordless = 0
    with (folder / "tokens.bin").open("wb") as token_file, (folder / "ends.bin").open("wb") as end_file:
        for texts in _batches(config, count):
            encoded = [ids for ids in tokenizer.encode_batch(texts) if ids.size]
            wordless += len(texts) - len(encoded)
            lengths = np.array([ids.size + end.size for ids in encoded], np.int64)
            for ids in encoded:
                token_file.write(ids.astype(dtype).tobytes())
                token_file.write(end.tobytes())
            end_file.write((tokens + np.cumsum(lengths)).astype("<i8").tobytes())
            documents += len(encoded)
            tokens += int(lengths.sum())
    if not documents:
        raise ValueError(
            f"data.corpus={config.corpus!r} holds no text ({count.empty + wordless} empty documents). "
            "Set a corpus with at least two documents that have some."
        )
    return StoreHeader(
        format=FORMAT,
        documents=documents,
        tokens=tokens,
        dtype=dtype.str,
        vocabulary_size=tokenizer.vocabulary_size,
        tokenizer_digest=tokenizer.digest,
        end_id=tokenizer.end_id,
        corpus=config.corpus,
        corpus_digest=digest,
        text_field=config.text_field,
        empty_documents=count.empty + wordless,
        undecodable_documents=count.undecodable,
    )


def _batches(config: DataConfig, count: CorpusCount) -> Iterator[list[str]]:
    """Texts in lists long enough for the tokenizer's threads and short enough to keep memory flat."""
    texts: list[str] = []
    characters = 0
    for document in read_documents(config.corpus, config.text_field, count):
        texts.append(document.text)
        characters += len(document.text)
        if len(texts) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts
