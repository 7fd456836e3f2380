"""Files of one JSON object a line, plain or compressed by gzip or zstd. pyarrow decompresses.

A plain file is cut into ranges of bytes, so that several processes can read it at once; a range holds the lines that
begin in it. A compressed one has to be read from its start.
"""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from datamodules.sources.records import Fields, documents_of, one_line, unreadable
from datamodules.sources.source import PART_BYTES, Document, Part, Skipped

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
SUFFIXES = tuple(f"{kind}{packed}" for kind in (".jsonl", ".ndjson", ".json") for packed in ("", *COMPRESSIONS))


@dataclass(frozen=True)
class JsonLines:
    """The lines of a file that begin in bytes [begin, end)."""

    file: Path
    fields: Fields
    begin: int
    end: int
    size: int

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        with _opened(self.file, self.fields) as stream:
            offset = self.begin
            if self.begin:  # the line that reaches into this range belongs to the one before
                stream.seek(self.begin - 1)
                offset += len(stream.readline()) - 1
            for lines, line in enumerate(_lines(stream, self.file, self.fields), 1):
                if offset >= self.end:
                    return
                if line.strip():
                    # Lines before the range are counted only where a message needs their number.
                    where = f"{self.file}, byte {offset}" if self.begin else f"{self.file}:{lines}"
                    try:
                        record = _record(line, where, offset, self.file, self.fields)
                        yield from documents_of(record, where, self.fields, skipped)
                    except ValueError as error:
                        if not self.begin:
                            raise
                        number = _newlines_before(self.file, offset) + 1
                        raise ValueError(str(error).replace(where, f"{self.file}:{number}")) from error
                offset += len(line)


def parts_of(file: Path, fields: Fields) -> list[Part]:
    """The whole file in parts."""
    size = file.stat().st_size
    if file.suffix in COMPRESSIONS:
        return [JsonLines(file, fields, 0, 1 << 62, size)]
    return [
        JsonLines(file, fields, begin, min(begin + PART_BYTES, size), min(PART_BYTES, size - begin))
        for begin in range(0, max(size, 1), PART_BYTES)
    ]


@contextmanager
def _opened(file: Path, fields: Fields) -> Iterator[BinaryIO]:
    import pyarrow

    try:
        stream = pyarrow.input_stream(str(file), compression=COMPRESSIONS.get(file.suffix))
    except OSError as error:
        raise unreadable(file, error, fields) from error
    # Buffered, since lines would else be read byte by byte.
    with io.BufferedReader(stream, 1 << 20) as buffered:
        yield buffered


def _lines(stream: BinaryIO, file: Path, fields: Fields) -> Iterator[bytes]:
    """Lines end at b"\n" alone. Text mode and str.splitlines would also split at U+2028, which JSON text may hold."""
    try:
        yield from stream
    except OSError as error:  # what pyarrow says of data that end too early or are not compressed
        raise fields.error(
            f"{file} cannot be read to its end ({one_line(error)}). It is cut short, or not what its name "
            "says: fetch it again."
        ) from error


def _record(line: bytes, where: str, offset: int, file: Path, fields: Fields) -> dict[str, Any]:
    """The JSON object of one line, which begins `offset` bytes into the file."""
    try:
        # A byte order mark is allowed at the start of the file, as in most editors' output.
        record = json.loads(line.decode().removeprefix("\ufeff" if offset == 0 else ""))
    except UnicodeDecodeError as error:
        raise fields.error(
            f"{file}, byte {offset + error.start}: no UTF-8 ({error.reason}). Save the file as UTF-8."
        ) from error
    except (ValueError, RecursionError) as error:
        raise fields.error(f"{where}: no JSON ({error}). Every line has to be one JSON object with a text.") from error
    if not isinstance(record, dict):
        raise fields.error(f"{where}: a JSON {type(record).__name__}, not an object with a text.")
    return record


def _newlines_before(file: Path, offset: int) -> int:
    with file.open("rb") as stream:
        blocks = iter(lambda: stream.read(min(1 << 20, offset - stream.tell())), b"")
        return sum(block.count(b"\n") for block in blocks)
