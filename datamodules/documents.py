"""Where documents come from: this Python's own source files, or the lines of a jsonl file.

Both are read one document at a time, so memory holds the longest document and never the corpus.
"""

import hashlib
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

STDLIB = "python_stdlib"
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Document(NamedTuple):
    """One text and where it stands: a file's path inside the corpus, or `FILE:LINE` of a jsonl file."""

    text: str
    name: str


@dataclass(kw_only=True)
class CorpusCount:
    """What reading a corpus met; filled while `read_documents` runs."""

    documents: int = 0
    """Handed out."""
    empty: int = 0
    """Left out, having no text."""
    undecodable: int = 0
    """Files of `python_stdlib` left out because their bytes are not in the encoding they declare."""


def read_documents(corpus: str, text_field: str = "text", count: CorpusCount | None = None) -> Iterator[Document]:
    """The documents of `data.corpus` that have text, always in the same order.

    Raises:
        ValueError: a corpus that is neither known nor a readable jsonl file; a line that is no JSON object, lacks
            `text_field` or holds something other than text there (with file and line); bytes that are no UTF-8
            (with file and byte offset).
    """
    count = CorpusCount() if count is None else count
    documents = _read_stdlib(count) if corpus == STDLIB else _read_jsonl(_jsonl_file(corpus), text_field)
    for document in documents:
        if document.text:
            count.documents += 1
            yield document
        else:
            count.empty += 1


def corpus_digest(corpus: str) -> str:
    """Hash of all the corpus' bytes (and, of `python_stdlib`, its file names). Reads all of it, parses nothing.

    Raises:
        ValueError: a corpus that is neither known nor a readable jsonl file.
    """
    if corpus != STDLIB:
        file = _jsonl_file(corpus)
        try:
            with file.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(file, error) from error
    digest = hashlib.sha256()
    for name, file in _stdlib_files():
        content = file.read_bytes()
        digest.update(f"{name}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _stdlib_files() -> list[tuple[str, Path]]:
    """(path inside the library, file), sorted by that path."""
    root = Path(sysconfig.get_path("stdlib"))
    kept = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # do not walk through them
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        kept += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    if not kept:
        raise ValueError(f"data.corpus={STDLIB}: this Python keeps no source files in {root}. Set a .jsonl file.")
    return sorted(kept)


def _read_stdlib(count: CorpusCount) -> Iterator[Document]:
    for name, path in _stdlib_files():
        try:
            with tokenize.open(path) as stream:
                text = stream.read()
        except (SyntaxError, UnicodeDecodeError):  # no fault of the user: left out, counted, reported
            count.undecodable += 1
            continue
        yield Document(text, name)


def _jsonl_file(corpus: str) -> Path:
    file = Path(corpus).expanduser()
    if file.suffix != ".jsonl":
        raise ValueError(f"data.corpus={corpus!r} is no corpus. Set {STDLIB} or the path of a .jsonl file.")
    return file


def _unreadable(file: Path, error: OSError) -> ValueError:
    return ValueError(f"data.corpus: cannot read {file} ({error.strerror}). Check the path and its permissions.")


def _read_jsonl(file: Path, text_field: str) -> Iterator[Document]:
    # Lines end at b"\n" alone. Text mode and str.splitlines would also split at U+2028, which JSON text may hold.
    try:
        stream = file.open("rb")
    except OSError as error:
        raise _unreadable(file, error) from error
    offset = 0
    with stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield Document(_text_of_line(line, text_field, f"{file}:{number}", file, offset), f"{file}:{number}")
            offset += len(line)


def _text_of_line(line: bytes, text_field: str, where: str, file: Path, offset: int) -> str:
    """The document of one line, which begins `offset` bytes into `file`."""
    try:
        # A byte order mark is allowed at the start of the file, as in most editors' output.
        entry = json.loads(line.decode().removeprefix("\ufeff" if offset == 0 else ""))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.corpus: {file}, byte {offset + error.start}: no UTF-8 ({error.reason}). Save the file as UTF-8."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"data.corpus: {where}: no JSON ({error}). Every line has to be one JSON object with a text."
        ) from error
    if not isinstance(entry, dict):
        raise ValueError(f"data.corpus: {where}: a JSON {type(entry).__name__}, not an object with a text.")
    if text_field not in entry:
        raise ValueError(
            f"data.corpus: {where}: no field {text_field!r}, only {', '.join(map(repr, entry)) or 'an empty object'}. "
            "Set data.text_field to the field that holds the text."
        )
    text = entry[text_field]
    if not isinstance(text, str):
        raise ValueError(
            f"data.corpus: {where}: field {text_field!r} holds {type(text).__name__}, not text. "
            "Set data.text_field to the field that holds the text."
        )
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON and no text
        raise ValueError(
            f"data.corpus: {where}: half of a surrogate pair at character {error.start} of the text, which no "
            "encoding can write. Replace it."
        ) from error
    return text
