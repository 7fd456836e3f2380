"""Files as sources: one file, a folder of one kind of them, or Python's own library.

Text files have one field besides their text: `folder`, the one below the corpus' own that a file stands in.
"""

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from datamodules.sources import json_lines, tables
from datamodules.sources.file_digests import FileDigests
from datamodules.sources.records import Fields, unreadable
from datamodules.sources.source import Document, Part, Skipped, Source, grouped

STDLIB = "python_stdlib"
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
PARQUET = ".parquet"
FOLDER = "folder"


@dataclass(frozen=True)
class TextFiles:
    """Files of text, each a document."""

    root: Path
    names: tuple[str, ...]
    fields: Fields
    size: int

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        for name in self.names:
            file = self.root / name
            try:
                text = file.read_bytes().decode("utf-8-sig")
            except OSError as error:
                raise unreadable(file, error, self.fields) from error
            except UnicodeDecodeError as error:
                raise self.fields.error(
                    f"{file}, byte {error.start}: no UTF-8 ({error.reason}). Save the file as UTF-8, or move what is "
                    "no text out of the folder."
                ) from error
            if text:
                yield Document(text, _folder(name, self.fields), name)
            else:
                skipped.empty += 1


@dataclass(frozen=True)
class PythonFiles:
    """Files of Python's own library, in whatever encoding they declare."""

    root: Path
    names: tuple[str, ...]
    fields: Fields
    size: int

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        for name in self.names:
            try:
                with tokenize.open(self.root / name) as stream:
                    text = stream.read()
            except (SyntaxError, UnicodeDecodeError):  # no fault of the user: left out, counted, reported
                skipped.undecodable += 1
                continue
            if text:
                yield Document(text, _folder(name, self.fields), name)
            else:
                skipped.empty += 1


class FileSource(Source):
    """All files of one kind, in the order of their names.

    Args:
        name: of the source.
        root: what names start from.
        names: files, relative to `root`.
    """

    def __init__(self, name: str, root: Path, names: list[str], fields: Fields) -> None:
        super().__init__(name)
        self.root, self.names, self.fields = root, names, fields

    def key(self, digests: FileDigests) -> list[str | int | None]:
        files = [(name, self.root / name) for name in self.names]
        try:
            # The name of a single file says nothing about its documents.
            content = digests.of(files if len(files) > 1 else [("", file) for _, file in files])
        except OSError as error:
            raise unreadable(Path(error.filename or self.root), error, self.fields) from error
        return [type(self).__name__, content, self.fields.text, self.fields.source]


class JsonLinesFiles(FileSource):
    """Files of a JSON object a line."""

    def parts(self) -> list[Part]:
        return [part for name in self.names for part in json_lines.parts_of(self.root / name, self.fields)]


class ParquetFiles(FileSource):
    """Files of tables."""

    def parts(self) -> list[Part]:
        return [part for name in self.names for part in tables.parquet_parts(self.root / name, self.fields)]


class TextFolder(FileSource):
    """Files that are documents themselves."""

    part: type[TextFiles] | type[PythonFiles] = TextFiles

    def parts(self) -> list[Part]:
        sizes = [(self.root / name).stat().st_size for name in self.names]
        return [
            self.part(self.root, tuple(self.names[first:last]), self.fields, sum(sizes[first:last]))
            for first, last in grouped(sizes)
        ]


class PythonLibrary(TextFolder):
    """Python's own library."""

    part = PythonFiles


def find_files(name: str, path: Path, fields: Fields) -> FileSource:
    """The source that a path names.

    Raises:
        ValueError: nothing there, no documents, files of several kinds, or a kind nobody reads.
    """
    if not path.exists():
        raise fields.error(f"cannot read {path} (no such file or folder). Check the path, or set python_stdlib.")
    if not path.is_dir():
        kind = _kind(path.name)
        if kind is TextFolder:
            raise fields.error(
                f"{path} is no corpus: a file must be {', '.join(json_lines.SUFFIXES[:4])} or {PARQUET}. One text "
                "file is one document: name the folder of all."
            )
        return kind(name, path.parent, [path.name], fields)
    names = _walk(path, fields)
    if not names:
        raise fields.error(f"the folder {path} holds no files. Name one with documents.")
    kinds: dict[type[FileSource], str] = {}
    for file in names:
        kinds.setdefault(_kind(file), file)
    if len(kinds) > 1:
        raise fields.error(
            f"the folder {path} holds files of several kinds, such as {' and '.join(kinds.values())}. Put each kind "
            "into a folder of its own, and name each in data.sources."
        )
    (kind,) = kinds
    if kind is TextFolder:
        _check_folder_field(fields)
    return kind(name, path, names, fields)


def python_library(name: str, fields: Fields) -> FileSource:
    """This Python's own source files.

    Raises:
        ValueError: it keeps none.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # do not walk through them
        paths = [Path(folder, file) for file in files if file.endswith(".py")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    if not names:
        raise ValueError(f"{fields.section}.corpus={STDLIB}: this Python keeps no source files in {root}. Set a file.")
    _check_folder_field(fields)
    return PythonLibrary(name, root, sorted(names), fields)


def _walk(root: Path, fields: Fields) -> list[str]:
    """Files below a folder, hidden ones left out, sorted by their path from there."""
    names = []

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error, fields) from error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        names += [Path(folder, file).relative_to(root).as_posix() for file in files if not file.startswith(".")]
    return sorted(names)


def _kind(name: str) -> type[FileSource]:
    lower = name.lower()
    if lower.endswith(json_lines.SUFFIXES):
        return JsonLinesFiles
    return ParquetFiles if lower.endswith(PARQUET) else TextFolder


def _folder(name: str, fields: Fields) -> str | None:
    folder, slash, _ = name.partition("/")
    return folder if fields.source and slash else None


def _check_folder_field(fields: Fields) -> None:
    if fields.source not in (None, FOLDER):
        raise ValueError(
            f"{fields.section}.source_field={fields.source!r}: files of text have no fields. Set {FOLDER} for the "
            "folder that a file stands in, or null."
        )
