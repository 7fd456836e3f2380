"""From a record, a JSON object or a row of a table, to documents.

    {"text": "..."}                                                           one document
    {"text": "...", "meta": {"set": "books"}}                                 of source books, source_field=meta.set
    {"input_ids": [7 8 9 5 6]}                                                one document, tokens already
    {"input_ids": [7 8 9 5 6], "source": [{"end": 3}, {"start": 3, "end": 5}]}    two: [7 8 9] and [5 6]

The last is how long-context data are published: ids of one window, and where its documents end (exclusive).
Source: the packed data of Fu et al., arXiv 2402.10171.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.sources.config import SourceConfig
from datamodules.sources.source import Document, Skipped

IDS = "input_ids"
BORDERS = "source"


@dataclass(frozen=True)
class Fields:
    """Which fields hold what, and the section of the settings that says so (`data`, or `data.sources.NAME`)."""

    section: str
    text: str
    source: str | None

    @classmethod
    def of(cls, config: SourceConfig, section: str) -> "Fields":
        return cls(section, config.text_field, config.source_field)

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.section}.corpus: {problem}")


def one_line(error: Exception) -> str:
    """What a library says, without its line breaks."""
    return " ".join(str(error).split())


def unreadable(path: Path, error: OSError, fields: Fields) -> ValueError:
    """A file or folder that the system does not give."""
    return fields.error(f"cannot read {path} ({error.strerror or error}). Check the path and its permissions.")


def documents_of(record: Mapping[str, Any], where: str, fields: Fields, skipped: Skipped) -> Iterator[Document]:
    """The documents of one record that are not empty.

    Args:
        record: field -> value; ids as a list of integers or an integer array.
        where: for messages.
    Raises:
        ValueError: neither text nor ids, a field of the wrong type, borders that do not rise or do not fit the ids.
    """
    if fields.text in record:
        text = _text(record[fields.text], where, fields)
        if text:
            yield Document(text, _source(record, where, fields), where)
        else:
            skipped.empty += 1
    elif IDS in record:
        yield from _token_documents(record, where, fields, skipped)
    else:
        raise fields.error(
            f"{where}: no field {fields.text!r}, only {', '.join(map(repr, record)) or 'an empty object'}. "
            f"Set {fields.section}.text_field to the field that holds the text."
        )


def _text(text: Any, where: str, fields: Fields) -> str:
    if not isinstance(text, str):
        raise fields.error(
            f"{where}: field {fields.text!r} holds {type(text).__name__}, not text. "
            f"Set {fields.section}.text_field to the field that holds the text."
        )
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON and no text
        raise fields.error(
            f"{where}: half of a surrogate pair at character {error.start} of the text, which no encoding can write. "
            "Replace it."
        ) from error
    return text


def _source(record: Mapping[str, Any], where: str, fields: Fields) -> str | None:
    """The source that the record names; None where no field was asked for."""
    if fields.source is None:
        return None
    value: Any = record
    for name in [fields.source] if fields.source in record else fields.source.split("."):
        if not isinstance(value, Mapping) or name not in value:
            known = ", ".join(map(repr, value)) if isinstance(value, Mapping) else type(value).__name__
            raise fields.error(
                f"{where}: no field {fields.source!r} that names the source, only {known}. "
                f"Set {fields.section}.source_field to one that is there, or to null."
            )
        value = value[name]
    if not isinstance(value, str) or not value:
        raise fields.error(
            f"{where}: field {fields.source!r} holds {value!r}, not the name of a source. "
            f"Set {fields.section}.source_field to a field that holds text, or to null."
        )
    return value


def _token_documents(record: Mapping[str, Any], where: str, fields: Fields, skipped: Skipped) -> Iterator[Document]:
    ids = _ids(record[IDS], where, fields)
    borders = record.get(BORDERS)
    if borders is None or isinstance(borders, str):  # a name for the whole record
        if ids.size:
            yield Document(ids, _source(record, where, fields), where)
        else:
            skipped.empty += 1
        return
    start = 0
    for number, entry in enumerate(_borders(borders, len(ids), where, fields)):
        end = int(entry["end"])
        if end > start:
            place = f"{where}, document {number + 1}"
            yield Document(ids[start:end], _source(entry, place, fields), place)
        else:
            skipped.empty += 1
        start = end


def _ids(values: Any, where: str, fields: Fields) -> np.ndarray:
    try:
        ids = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths
        ids = np.array(None)
    if ids.ndim != 1 or not (ids.size == 0 or np.issubdtype(ids.dtype, np.integer)):
        raise fields.error(f"{where}: field {IDS!r} is no list of whole numbers, which token ids are.")
    return ids


def _borders(entries: Any, tokens: int, where: str, fields: Fields) -> Sequence[Mapping[str, Any]]:
    """Checked: `end` never falls, `start` (if given) is the `end` before, and the last `end` is the number of ids."""
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
        raise fields.error(f"{where}: field {BORDERS!r} is no list of objects such as {{'end': 512}}.")
    before = 0
    for number, entry in enumerate(entries, start=1):
        start, end = entry.get("start"), entry.get("end")
        if isinstance(end, bool) or not isinstance(end, int):
            raise fields.error(f"{where}: document {number} of {BORDERS!r} ends at {end!r}, no whole number.")
        if end < before:
            raise fields.error(
                f"{where}: document {number} of {BORDERS!r} ends at {end}, before its start at {before}. "
                "Ends must rise."
            )
        if start is not None and start != before:
            raise fields.error(
                f"{where}: document {number} of {BORDERS!r} starts at {start}, but the one before it ends at {before}. "
                "Documents must follow one another without gaps."
            )
        if end > tokens:
            raise fields.error(
                f"{where}: document {number} of {BORDERS!r} ends at {end}, but there are {tokens} ids. Ends count ids, "
                "and are exclusive."
            )
        before = end
    if before != tokens:
        raise fields.error(
            f"{where}: the documents of {BORDERS!r} end at {before}, but there are {tokens} ids: the last "
            f"{tokens - before} belong to none. Add a last document that ends at {tokens}, or remove those ids."
        )
    return entries
