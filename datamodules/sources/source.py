"""What every source of documents offers: parts that can be read one by one, each by a process of its own."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from datamodules.sources.file_digests import FileDigests

PART_BYTES = 1 << 24
"""About so many bytes of a source make one part: small enough to spread over processes, to report progress and to lose
little to a kill; large enough to cost nothing."""


class Document(NamedTuple):
    """One document and where it stands."""

    content: str | np.ndarray
    """Text, or ids (integers, one dimension) of a document that is tokens already."""
    source: str | None
    """What `source_field` says; None without one."""
    where: str
    """For people: a file's path inside its folder, `FILE:LINE` or `FILE, row N`."""


@dataclass(kw_only=True)
class Skipped:
    """What reading left out; filled while a part is read."""

    empty: int = 0
    """Documents without text."""
    undecodable: int = 0
    """Files of `python_stdlib` whose bytes are not in the encoding they declare."""


class Part(Protocol):
    """A piece of a source. Pickles, and equal sources have equal parts in equal order."""

    @property
    def size(self) -> int:
        """About its bytes, of the source; 0 where nobody knows."""

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """All its documents that are not empty, in order. Memory holds a few of them at a time.

        Raises:
            ValueError: what the user has to mend, with file and line, byte or row.
        """


class Source(ABC):
    """Documents of one origin."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Source of the documents that do not name one themselves."""
        self.setting = name
        """For messages: the setting that names it, with its value."""

    @abstractmethod
    def key(self, digests: FileDigests) -> list[str | int | None]:
        """What its documents depend on: content, and the settings that choose from it. Equal keys, equal documents.

        Raises:
            ValueError: it cannot be read.
        """

    @abstractmethod
    def parts(self) -> list[Part]:
        """All of it, in order."""


@dataclass(frozen=True)
class FirstDocuments:
    """The first `limit` documents of several parts, as one part."""

    parts: tuple[Part, ...]
    limit: int
    size: int = 0

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        left = self.limit
        for part in self.parts:
            for document in part.documents(skipped):
                yield document
                left -= 1
                if not left:
                    return


def grouped(sizes: list[int], most: int = PART_BYTES) -> list[tuple[int, int]]:
    """Neighbours of together about `most`, as (first, after the last): [3 3 9 1], 6 -> (0 2) (2 3) (3 4)."""
    spans, begin, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > begin and total + size > most:
            spans.append((begin, index))
            begin, total = index, 0
        total += size
    return [*spans, (begin, len(sizes))] if sizes else []
