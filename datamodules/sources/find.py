"""From settings to sources."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from datamodules.sources.config import HUB, SourceConfig
from datamodules.sources.file_digests import FileDigests
from datamodules.sources.files import STDLIB, find_files, python_library
from datamodules.sources.hugging_face import HubDataset, SavedDataset, StreamedDataset, is_saved
from datamodules.sources.records import Fields
from datamodules.sources.source import Document, FirstDocuments, Part, Skipped, Source


def find_source(config: SourceConfig, section: str = "data", name: str | None = None) -> Source:
    """The source that settings describe. Looks whether it is there, reads no document.

    Args:
        config: the settings.
        section: where they stand, for messages: `data`, or `data.sources.NAME`.
        name: of the source; None takes the corpus' own, without folders and endings.
    Raises:
        ValueError: nothing there, or nothing that could be read.
    """
    if broken := config.broken_source_rules():
        raise ValueError("\n".join(f"{section}.{line}" for line in broken))
    fields = Fields.of(config, section)
    name = name or own_name(config.corpus)
    source: Source
    if config.corpus == STDLIB:
        source = python_library(name, fields)
    elif config.corpus.startswith(HUB):
        source = (StreamedDataset if config.streaming else HubDataset)(name, config, fields)
    else:
        path = Path(config.corpus).expanduser()
        source = SavedDataset(name, path, config, fields) if is_saved(path) else find_files(name, path, fields)
    source = source if config.max_documents is None else _Limited(source, config.max_documents)
    source.setting = f"{section}.corpus={config.corpus!r}"
    return source


def find_sources(config: SourceConfig, sources: Mapping[str, SourceConfig]) -> list[Source]:
    """All sources of a run: those of `data.sources`, else the one of `data.corpus`."""
    if not sources:
        return [find_source(config)]
    return [find_source(each, f"data.sources.{name}", name) for name, each in sources.items()]


def own_name(corpus: str) -> str:
    """`books/part-1.jsonl.zst` -> `part-1`, `hub:org/name` -> `name`."""
    name = Path(corpus.removeprefix(HUB)).name
    return name.partition(".")[0] or name or corpus


def read_documents(config: SourceConfig, skipped: Skipped | None = None) -> Iterator[Document]:
    """All documents of one source that are not empty, in order."""
    skipped = Skipped() if skipped is None else skipped
    for part in find_source(config).parts():
        yield from part.documents(skipped)


class _Limited(Source):
    """The first documents of another source."""

    def __init__(self, source: Source, limit: int) -> None:
        super().__init__(source.name)
        self.source, self.limit = source, limit

    def key(self, digests: FileDigests) -> list[str | int | None]:
        return [*self.source.key(digests), "max_documents", self.limit]

    def parts(self) -> list[Part]:
        return [FirstDocuments(tuple(self.source.parts()), self.limit)]
