"""Datasets of the library `datasets`: saved on disk, on the hub, or streamed from there.

The library finds, downloads and checks; what lies on disk then are Arrow files, which pyarrow reads. A hub dataset
counts by the commit that its name led to, so a changed dataset never meets old tokens.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datamodules.sources.config import HUB, SourceConfig
from datamodules.sources.file_digests import FileDigests
from datamodules.sources.records import Fields, one_line, unreadable
from datamodules.sources.source import Document, Part, Skipped, Source
from datamodules.sources.tables import ROWS_AT_ONCE, arrow_parts, documents_of_batch

SAVED_DATASET, SAVED_SPLITS = "dataset_info.json", "dataset_dict.json"
INSTALL = "pip install 'datasets>=5.0.1'"


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (folder / SAVED_SPLITS).is_file() or all((folder / f).is_file() for f in (SAVED_DATASET, "state.json"))


class SavedDataset(Source):
    """A folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""

    def __init__(self, name: str, folder: Path, config: SourceConfig, fields: Fields) -> None:
        super().__init__(name)
        self.folder, self.split, self.fields = folder, config.split, fields

    def key(self, digests: FileDigests) -> list[str | int | None]:
        files = self._files()
        try:
            content = digests.of([(file.name, file) for file in files])
        except OSError as error:
            raise unreadable(Path(error.filename or self.folder), error, self.fields) from error
        return [type(self).__name__, content, self.fields.text, self.fields.source]

    def parts(self) -> list[Part]:
        return [part for file in self._files() for part in arrow_parts(file, self.fields)]

    def _files(self) -> list[Path]:
        """The Arrow files of the split. The library names them in order; reading them is not needed for that."""
        datasets = _library(self.fields)
        with _as_user_error(self.fields, str(self.folder)):
            saved = datasets.load_from_disk(str(self.folder))
        if isinstance(saved, datasets.DatasetDict):
            if self.split not in saved:
                raise ValueError(
                    f"{self.fields.section}.split={self.split!r}: {self.folder} has {', '.join(saved)}. "
                    "Set one of them."
                )
            saved = saved[self.split]
        return [Path(entry["filename"]) for entry in saved.cache_files]


class HubDataset(Source):
    """A dataset of the hub, downloaded into the library's own cache."""

    def __init__(self, name: str, config: SourceConfig, fields: Fields) -> None:
        super().__init__(name)
        self.config, self.fields = config, fields
        self._commit: str | None = None

    def key(self, digests: FileDigests) -> list[str | int | None]:
        config = self.config
        repository = config.corpus.removeprefix(HUB)
        return ["hub", repository, config.subset, config.split, self.commit, self.fields.text, self.fields.source]

    @property
    def commit(self) -> str:
        """What `revision` stands for now; asks the hub, or without a net the library's cache."""
        if self._commit is None:
            datasets, asked = _library(self.fields), self.config.revision
            with _as_user_error(self.fields, self.config.corpus):
                self._commit = str(datasets.load_dataset_builder(**_arguments(self.config)).hash)
            # Without a net the library gives what it has, whatever was asked for.
            if asked is not None and re.fullmatch(r"[0-9a-f]{40}", asked) and self._commit != asked:
                raise self.fields.error(
                    f"{self.config.corpus} at commit {asked} is not at hand; the library's cache holds {self._commit}. "
                    f"Connect to the hub, or set {self.fields.section}.revision to that one."
                )
        return self._commit

    @property
    def pinned(self) -> SourceConfig:
        """The settings at that commit, so that whoever reads reads what the key says."""
        return replace(self.config, revision=self.commit)

    def parts(self) -> list[Part]:
        datasets = _library(self.fields)
        with _as_user_error(self.fields, self.config.corpus):
            loaded = datasets.load_dataset(**_arguments(self.pinned), split=self.config.split)
        files = [Path(entry["filename"]) for entry in loaded.cache_files]
        return [part for file in files for part in arrow_parts(file, self.fields)]


class StreamedDataset(HubDataset):
    """A dataset of the hub that is read over the net while it is tokenised; nothing of it is kept but tokens."""

    def parts(self) -> list[Part]:
        shards = open_stream(self.pinned, self.fields).num_shards
        return [StreamedShard(self.pinned, self.fields, shard, shards) for shard in range(shards)]


@dataclass(frozen=True)
class StreamedShard:
    """One of the shards that a streamed dataset comes in."""

    config: SourceConfig
    fields: Fields
    shard: int
    shards: int
    size: int = 0

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        stream = open_stream(self.config, self.fields).shard(num_shards=self.shards, index=self.shard)
        name, row = f"{self.config.corpus}, shard {self.shard}", 0
        with _as_user_error(self.fields, name):
            for table in stream.with_format("arrow").iter(ROWS_AT_ONCE):
                yield from documents_of_batch(table, name, row, self.fields, skipped)
                row += table.num_rows


def open_stream(config: SourceConfig, fields: Fields) -> Any:
    """The `IterableDataset` of the split, without a shuffle buffer: those lose and repeat documents on resuming."""
    datasets = _library(fields)
    with _as_user_error(fields, config.corpus):
        return datasets.load_dataset(**_arguments(config), split=config.split, streaming=True)


def _arguments(config: SourceConfig) -> dict[str, Any]:
    return {"path": config.corpus.removeprefix(HUB), "name": config.subset, "revision": config.revision}


def _library(fields: Fields) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise fields.error(f"datasets of Hugging Face need the package datasets: {INSTALL}.") from error
    datasets.disable_progress_bars()
    for name in ("datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return datasets


@contextmanager
def _as_user_error(fields: Fields, what: str) -> Iterator[None]:
    """Turns what the library raises for names, splits, files and nets into one message."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(fields.section):
            raise
        raise fields.error(f"{what} cannot be loaded: {one_line(error)}") from error
    except (OSError, ImportError, RuntimeError) as error:
        raise fields.error(f"{what} cannot be loaded: {one_line(error)}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("datasets", "huggingface_hub", "pyarrow", "fsspec", "httpx"):
            raise fields.error(f"{what} cannot be loaded: {one_line(error)}") from error
        raise
