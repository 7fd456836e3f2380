"""Tables: parquet files, and the Arrow files of Hugging Face datasets. pyarrow reads both, some rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.sources.records import BORDERS, IDS, Fields, documents_of, one_line, unreadable
from datamodules.sources.source import Document, Part, Skipped, grouped

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 64
"""Documents are long: a few are enough to keep the reader busy, and memory holds no more."""


@dataclass(frozen=True)
class ParquetRows:
    """Some row groups of a parquet file, [first, last)."""

    file: Path
    fields: Fields
    first: int
    last: int
    first_row: int
    """Rows in the groups before."""
    size: int

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        import pyarrow

        row = self.first_row
        try:
            with _parquet(self.file, self.fields) as parquet:
                names = _columns(parquet.schema_arrow, str(self.file), self.fields)
                groups = list(range(self.first, self.last))
                for batch in parquet.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=names):
                    yield from documents_of_batch(batch, str(self.file), row, self.fields, skipped)
                    row += batch.num_rows
        except (OSError, pyarrow.ArrowException) as error:
            raise self.fields.error(
                f"{self.file} cannot be read from row {row + 1} on ({one_line(error)}). It is damaged: fetch it again."
            ) from error


@dataclass(frozen=True)
class ArrowRows:
    """Some record batches of an Arrow stream file, [first, last)."""

    file: Path
    fields: Fields
    first: int
    last: int
    first_row: int
    size: int

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        row = self.first_row
        for number, batch in enumerate(arrow_batches(self.file, self.fields)):
            if number >= self.last:
                return
            if number < self.first:
                continue
            batch = batch.select(_columns(batch.schema, str(self.file), self.fields))
            for begin in range(0, batch.num_rows, ROWS_AT_ONCE):
                piece = batch.slice(begin, ROWS_AT_ONCE)
                yield from documents_of_batch(piece, str(self.file), row + begin, self.fields, skipped)
            row += batch.num_rows


def parquet_parts(file: Path, fields: Fields) -> list[Part]:
    """The whole file in parts of whole row groups.

    Raises:
        ValueError: the file is no parquet, or has not the fields.
    """
    with _parquet(file, fields) as parquet:
        _columns(parquet.schema_arrow, str(file), fields)
        groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
        sizes, rows = [group.total_byte_size for group in groups], [group.num_rows for group in groups]
    return [
        ParquetRows(file, fields, first, last, sum(rows[:first]), sum(sizes[first:last]))
        for first, last in grouped(sizes)
    ]


def arrow_parts(file: Path, fields: Fields) -> list[Part]:
    """The whole file in parts of whole record batches."""
    sizes, rows = [], []
    for batch in arrow_batches(file, fields):
        _columns(batch.schema, str(file), fields)
        sizes.append(batch.nbytes)
        rows.append(batch.num_rows)
    return [
        ArrowRows(file, fields, first, last, sum(rows[:first]), sum(sizes[first:last]))
        for first, last in grouped(sizes)
    ]


def arrow_batches(file: Path, fields: Fields) -> Iterator["pyarrow.RecordBatch"]:
    """Record batches of a memory-mapped file: nothing is read before a column is."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as stream:
            yield from pyarrow.ipc.open_stream(stream)
    except (OSError, pyarrow.ArrowException) as error:
        raise fields.error(
            f"{file} cannot be read ({one_line(error)}). It is damaged or cut short: save it again."
        ) from error


def documents_of_batch(
    batch: "pyarrow.RecordBatch | pyarrow.Table", file: str, first_row: int, fields: Fields, skipped: Skipped
) -> Iterator[Document]:
    """The documents of some rows. Ids stay arrays; all else becomes Python's own objects."""
    columns: dict[str, Any] = {}
    for name in batch.schema.names:
        column = batch.column(name)
        columns[name] = (
            _id_arrays(column) if name == IDS and fields.text not in batch.schema.names else column.to_pylist()
        )
    for i in range(batch.num_rows):
        record = {name: values[i] for name, values in columns.items()}
        yield from documents_of(record, f"{file}, row {first_row + i + 1}", fields, skipped)


def _id_arrays(column: "pyarrow.Array | pyarrow.ChunkedArray") -> list[Any]:
    """An integer array for each row; whatever is none stays as it is and is refused with its row."""
    arrays = []
    for value in column:
        values: Any = value.values if value.is_valid and hasattr(value, "values") else None
        whole = values is not None and values.null_count == 0
        arrays.append(values.to_numpy(zero_copy_only=False) if whole else value.as_py())
    return arrays


def _columns(schema: "pyarrow.Schema", file: str, fields: Fields) -> list[str]:
    """The columns to read.

    Raises:
        ValueError: none of them holds documents.
    """
    names = set(schema.names)
    if fields.text in names:
        wanted = {fields.text}
    elif IDS in names:
        wanted = {IDS, BORDERS}
    else:
        raise fields.error(
            f"{file}: no column {fields.text!r}, only {', '.join(map(repr, schema.names)) or 'none'}. "
            f"Set {fields.section}.text_field to the column that holds the text."
        )
    if fields.source is not None:
        wanted |= {fields.source, fields.source.partition(".")[0]}
    return [name for name in schema.names if name in wanted]


def _parquet(file: Path, fields: Fields) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        # Read through a small buffer instead of whole column chunks.
        return pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    except FileNotFoundError as error:
        raise unreadable(file, error, fields) from error
    except (OSError, pyarrow.ArrowException) as error:
        raise fields.error(
            f"{file} is no parquet file ({one_line(error)}). It is cut short, or not what its name "
            "says: fetch it again."
        ) from error
