import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from datamodules.sources import tables
from datamodules.sources.config import SourceConfig
from datamodules.sources.find import find_source, read_documents
from datamodules.sources.source import Skipped


def write(file, columns, **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), file, **options)
    return str(file)


def read(corpus, **settings):
    return list(read_documents(SourceConfig(corpus=str(corpus), **settings)))


def test_rows_become_documents(tmp_path, monkeypatch):
    texts = [f"text {i}" if i % 5 else "" for i in range(200)]
    corpus = write(
        tmp_path / "a.parquet",
        {"text": texts, "other": list(range(200)), "meta": [{"set": "ab"[i % 2]} for i in range(200)]},
        row_group_size=30,
    )
    kept = [(text, "ab"[i % 2], f"{corpus}, row {i + 1}") for i, text in enumerate(texts) if text]
    for size in (1, 500, 1 << 24):
        monkeypatch.setattr(tables, "grouped", lambda sizes, most=size: _grouped(sizes, most))
        assert [tuple(document) for document in read(corpus, source_field="meta.set")] == kept
    assert [document.source for document in read(corpus)] == [None] * len(kept)


def _grouped(sizes, most):
    from datamodules.sources.source import grouped

    return grouped(sizes, most)


def test_ids_and_borders(tmp_path):
    corpus = write(
        tmp_path / "a.parquet",
        {
            "input_ids": pyarrow.array([[1, 2, 3], [], [4, 5]], pyarrow.list_(pyarrow.int32())),
            "source": [[{"end": 2}, {"end": 3}], [], [{"end": 2}]],
            "labels": [7, 8, 9],
        },
    )
    assert [document.content.tolist() for document in read(corpus)] == [[1, 2], [3], [4, 5]]
    large = write(tmp_path / "b.parquet", {"input_ids": pyarrow.array([[9, 8]], pyarrow.large_list(pyarrow.uint32()))})
    (document,) = read(large)
    assert document.content.tolist() == [9, 8] and isinstance(document.content, np.ndarray)
    bad = write(tmp_path / "c.parquet", {"input_ids": [[1, 2], [1, 2]], "source": [[{"end": 2}], [{"end": 3}]]})
    with pytest.raises(ValueError, match=r"c\.parquet, row 2: document 1 of 'source' ends at 3, but there are 2 ids"):
        read(bad)
    holes = write(tmp_path / "d.parquet", {"input_ids": [[1], [1, None]]})
    with pytest.raises(ValueError, match=r"d\.parquet, row 2: field 'input_ids' is no list of whole numbers"):
        read(holes)


def test_damaged_and_foreign_files(tmp_path):
    corpus = write(tmp_path / "a.parquet", {"text": ["x" * 1000, "y" * 1000]}, compression="none", use_dictionary=False)
    whole = (tmp_path / "a.parquet").read_bytes()
    for content, message in [
        (whole[: len(whole) // 2], r"a\.parquet is no parquet file"),
        (b"", r"a\.parquet is no parquet file"),
        (whole[:4] + b"\xff" * 60 + whole[64:], r"a\.parquet cannot be read from row 1 on"),
    ]:
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(ValueError, match=rf"data\.corpus: .*{message}.*fetch it again"):
            read(corpus)
    numbers = write(tmp_path / "n.parquet", {"text": [1, 2]})
    with pytest.raises(ValueError, match=r"n\.parquet, row 1: field 'text' holds int, not text"):
        read(numbers)
    with pytest.raises(ValueError, match=r"no column 'body', only 'text'\. Set data\.text_field"):
        find_source(SourceConfig(corpus=numbers, text_field="body")).parts()
    nothing = write(tmp_path / "m.parquet", {"text": ["a", None]})
    with pytest.raises(ValueError, match=r"m\.parquet, row 2: field 'text' holds NoneType"):
        read(nothing)


def test_parquet_and_json_lines_give_the_same_documents(tmp_path):
    random = np.random.default_rng(1)
    records = [
        {
            "input_ids": random.integers(0, 99, 20).tolist(),
            "source": [{"end": int(cut), "name": "a"}, {"end": 20, "name": "b"}],
        }
        for cut in random.integers(0, 21, 40)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    write(tmp_path / "a.parquet", {key: [record[key] for record in records] for key in records[0]}, row_group_size=7)
    skipped = [Skipped(), Skipped()]
    one, two = (
        [
            (document.content.tolist(), document.source)
            for document in read_documents(SourceConfig(corpus=str(tmp_path / name), source_field="name"), count)
        ]
        for name, count in zip(("a.jsonl", "a.parquet"), skipped, strict=True)
    )
    assert one == two and len(one) > 40 and skipped[0] == skipped[1]
