"""All documents of a run: the token stores of its sources as one list.

Each source has a store of its own, so that adding one to a mix, or changing one, tokenises no other again.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from filelock import FileLock

from datamodules.config import DataConfig
from datamodules.document_table import DocumentTable
from datamodules.sources.file_digests import FileDigests
from datamodules.sources.find import find_sources
from datamodules.sources.source import Source
from datamodules.token_store import OWN, TokenStore, store_directory
from datamodules.tokenising import Progress, tokenise
from datamodules.tokenizers import Tokenizer

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class _Wanted:
    """A source, its key and where its store is or will be."""

    source: Source
    key: list[str | int | None]
    directory: Path

    @property
    def partial(self) -> Path:
        return self.directory.with_suffix(".partial")


class Corpus:
    """Documents of one or several stores, numbered one after another. Pickles as the stores' paths.

    Args:
        stores: by their source's name, in order.
    """

    def __init__(self, stores: dict[str, TokenStore]) -> None:
        self.stores = stores
        counts = [store.header.documents for store in stores.values()]
        self.store_of = np.repeat(np.arange(len(counts)), counts)
        """int64 [documents], which store each document is in."""
        self.begins = np.concatenate([np.asarray(store.ends) - store.lengths for store in stores.values()])
        """int64 [documents], where each document begins in its store's tokens."""

    def __reduce__(self) -> tuple[type["Corpus"], tuple[dict[str, TokenStore]]]:
        return Corpus, (self.stores,)

    @cached_property
    def table(self) -> DocumentTable:
        """Lengths and sources of all documents: what planning needs."""
        names: dict[str, int] = {}
        source = []
        for own, store in self.stores.items():
            indices = [names.setdefault(own if name == OWN else name, len(names)) for name in store.header.sources]
            source.append(np.array(indices, np.int64)[np.asarray(store.sources)])
        lengths = np.concatenate([store.lengths for store in self.stores.values()])
        return DocumentTable(lengths, np.concatenate(source), tuple(names))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, its end token included: int64 [documents], each >= 1."""
        return self.table.lengths

    @cached_property
    def tokens(self) -> list[np.ndarray]:
        """The flat ids of each store, as plain views: slices of a memmap object cost several times as much."""
        return [np.asarray(store.tokens) for store in self.stores.values()]

    @property
    def digest(self) -> str:
        """Identity of documents and tokenizer."""
        return corpus_digest(
            {name: store.header.source_key for name, store in self.stores.items()}, self.tokenizer_digest
        )

    @property
    def tokenizer_digest(self) -> str:
        """The tokenizer's that made all tokens."""
        return next(iter(self.stores.values())).header.tokenizer_digest

    def document(self, index: int) -> np.ndarray:
        """Ids of one document."""
        begin = self.begins[index]
        return self.tokens[self.store_of[index]][begin : begin + self.lengths[index]]

    def report(self) -> dict[str, int]:
        """Counts for a run's log."""
        headers = [store.header for store in self.stores.values()]
        return {
            "documents": sum(header.documents for header in headers),
            "tokens": sum(header.tokens for header in headers),
            "empty_documents": sum(header.empty_documents for header in headers),
            "undecodable_documents": sum(header.undecodable_documents for header in headers),
            "removed_anchors": sum(header.removed_anchors for header in headers),
        }

    @classmethod
    def find(
        cls, home: Path, config: DataConfig, tokenizer: Tokenizer, *, digests: FileDigests | None = None
    ) -> tuple[str, Self | None]:
        """(digest, the documents if all their stores are whole already). Reads sources for their hash, writes nothing.

        Args:
            digests: for one who asks several times.
        Raises:
            ValueError: a source that is missing or cannot be read.
        """
        wanted = _wanted(home, config, tokenizer, digests or file_digests(home))
        digest = corpus_digest({each.source.name: each.key for each in wanted}, tokenizer.digest)
        stores = {each.source.name: TokenStore.open_whole(each.directory) for each in wanted}
        whole = {name: store for name, store in stores.items() if store is not None}
        return digest, cls(whole) if len(whole) == len(stores) else None

    @classmethod
    def open_or_build(
        cls,
        home: Path,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        accept: Callable[[DocumentTable], object] = lambda table: None,
        report: Callable[[str, Progress], object] = lambda source, progress: None,
        digests: FileDigests | None = None,
    ) -> Self:
        """The documents of these settings, tokenised first where a store is missing.

        Any number of processes may ask for one store at once: one builds, the others wait for it. A build that fails
        leaves nothing behind; one that is killed or interrupted goes on with the next call.

        Args:
            accept: given all documents before new stores are kept; raises for documents that nothing can be made of,
                and they are not kept then.
            report: told now and then how far which source is.
            digests: for one who asks several times.
        Raises:
            ValueError: what reading raises, a source without text, or what `accept` raises.
            OSError: the disk is full, with the size needed, or broken.
        """
        digests = digests or file_digests(home)
        wanted = _wanted(home, config, tokenizer, digests)
        stores = [TokenStore.open_whole(each.directory) for each in wanted]
        if None in stores:
            with ExitStack() as locks:
                # In one order for all, so that two calls never wait for one another.
                for directory in sorted({each.directory for each in wanted}):
                    locks.enter_context(_locked(directory))
                return cls._build(wanted, config, tokenizer, digests, accept, report)
        corpus = cls._of(wanted, [store for store in stores if store is not None])
        accept(corpus.table)
        digests.save()
        return corpus

    @classmethod
    def _build(
        cls,
        wanted: list[_Wanted],
        config: DataConfig,
        tokenizer: Tokenizer,
        digests: FileDigests,
        accept: Callable[[DocumentTable], object],
        report: Callable[[str, Progress], object],
    ) -> Self:
        """Tokenises beside the stores' own folders, and renames when all are whole. The caller holds the locks."""
        fresh: list[_Wanted] = []
        stores = []
        try:
            for each in wanted:
                store = TokenStore.open_whole(each.directory) or TokenStore.open_whole(each.partial)
                if store is None or store.directory == each.partial:
                    fresh.append(each)
                if store is None:
                    _tokenise(each, tokenizer, config.processes, report)
                    store = TokenStore(each.partial)
                stores.append(store)
            accept(cls._of(wanted, stores).table)
        except (KeyboardInterrupt, SystemExit, ChildProcessError):
            raise  # the next call goes on from what is there
        except BaseException:
            for each in fresh:
                shutil.rmtree(each.partial, ignore_errors=True)
            raise
        for each in fresh:
            shutil.rmtree(each.partial / "parts", ignore_errors=True)
            shutil.rmtree(each.directory, ignore_errors=True)  # one that was not whole
            each.partial.rename(each.directory)
        digests.save()
        return cls._of(wanted, [TokenStore(each.directory) for each in wanted])

    @classmethod
    def _of(cls, wanted: list[_Wanted], stores: list[TokenStore]) -> Self:
        return cls({each.source.name: store for each, store in zip(wanted, stores, strict=True)})


def file_digests(home: Path) -> FileDigests:
    """Hashes of files that are remembered under this home."""
    return FileDigests(home / "tokens" / "digests")


def corpus_digest(source_keys: dict[str, list[str | int | None]], tokenizer_digest: str) -> str:
    """Identity of documents and tokenizer. A single source's name says nothing about its documents."""
    named = list(source_keys.items()) if len(source_keys) > 1 else list(source_keys.values())
    return hashlib.sha256(json.dumps([named, tokenizer_digest]).encode()).hexdigest()[:32]


def _wanted(home: Path, config: DataConfig, tokenizer: Tokenizer, digests: FileDigests) -> list[_Wanted]:
    wanted = []
    for source in find_sources(config, config.sources):
        key = source.key(digests)
        wanted.append(_Wanted(source, key, store_directory(home, key, tokenizer)))
    return wanted


def _tokenise(wanted: _Wanted, tokenizer: Tokenizer, processes: int, report: Callable[[str, Progress], object]) -> None:
    last = Progress(tokens=0, size_done=0, size=0)

    def note(progress: Progress) -> None:
        nonlocal last
        last = progress
        report(wanted.source.name, progress)

    wanted.partial.mkdir(exist_ok=True)
    try:
        tokenise(wanted.source, wanted.key, wanted.partial, tokenizer, processes=processes or _cores(), report=note)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(error.errno, _full(wanted, error, last)) from error


def _full(wanted: _Wanted, error: OSError, last: Progress) -> str:
    """Says how much room tokenising needs."""
    written = sum(file.stat().st_size for file in wanted.partial.rglob("*") if file.is_file())
    share = last.size_done / last.size if last.size_done and last.size else 0
    needed = f"about {_gigabytes(written / share)} in all" if share else f"more than {_gigabytes(written)}"
    return (
        f"{wanted.directory.parent}: no room for the tokens of {wanted.source.name!r} "
        f"({os.strerror(error.errno or 0)}). "
        f"They need {needed}, {_gigabytes(written)} of which fitted and are removed again. Free that much, or set "
        "WORKBENCH_HOME to a folder on a larger disk."
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2g} GB" if size >= 1e7 else f"{size / 1e6:.2g} MB"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
