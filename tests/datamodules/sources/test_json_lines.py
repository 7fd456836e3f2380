import gzip
import json

import numpy as np
import pyarrow
import pytest

from datamodules.sources import json_lines
from datamodules.sources.config import SourceConfig
from datamodules.sources.find import find_source, read_documents
from datamodules.sources.source import Document, Skipped


def write(folder, content: bytes, name: str = "corpus.jsonl") -> str:
    file = folder / name
    file.write_bytes(content)
    return str(file)


def read(corpus: str, **settings) -> list[Document]:
    return list(read_documents(SourceConfig(corpus=corpus, **settings)))


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def test_lines_become_documents(tmp_path):
    text = "one\u2028still one\n"  # U+2028 ends a line for str.splitlines, and not for JSON
    lines = [{"text": text, "id": 1}, {"text": ""}, {"text": "two \u00e9 \U0001f600"}]
    encoded = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    corpus = write(tmp_path, b"\xef\xbb\xbf" + encoded.encode() + b"\n\n   \n" + b'{"text": "three"}')
    skipped = Skipped()
    assert list(read_documents(SourceConfig(corpus=corpus), skipped)) == [
        Document(text, None, f"{corpus}:1"),
        Document("two \u00e9 \U0001f600", None, f"{corpus}:3"),
        Document("three", None, f"{corpus}:6"),
    ]
    assert skipped == Skipped(empty=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "corpus.jsonl:2: no JSON"),
        (b"[" * 200_000, "corpus.jsonl:2: no JSON"),
        (b'"text"', "corpus.jsonl:2: a JSON str, not an object"),
        (b'{"body": "x"}', r"corpus.jsonl:2: no field 'text', only 'body'.*data\.text_field"),
        (b'{"text": null}', "corpus.jsonl:2: field 'text' holds NoneType"),
        (b'{"text": "\\ud800"}', "corpus.jsonl:2: half of a surrogate pair at character 0"),
        (b'{"text": "ab\xff"}', "corpus.jsonl, byte 27: no UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, monkeypatch, line, message):
    corpus = write(tmp_path, b'{"text": "ok"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        read(corpus)
    monkeypatch.setattr(json_lines, "PART_BYTES", 10)  # the line is then the first of a range that begins before it
    with pytest.raises(ValueError, match=message):
        read(corpus)


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".gz", gzip.compress), (".zst", zstd), (".zst", lambda content: zstd(content[:99]) + zstd(content[99:]))],
)
def test_compressed_files(tmp_path, suffix, pack):
    content = b"".join(b'{"text": "document %d"}\n' % i for i in range(50))
    corpus = write(tmp_path, pack(content), f"corpus.jsonl{suffix}")
    assert [document.content for document in read(corpus)] == [f"document {i}" for i in range(50)]
    whole = pack(content)
    for broken in (whole[: len(whole) // 2], b"no " + whole, content):
        with pytest.raises(
            ValueError, match=r"data\.corpus: .*corpus\.jsonl.*cannot be read to its end.*fetch it again"
        ):
            read(write(tmp_path, broken, f"corpus.jsonl{suffix}"))
    bad = write(tmp_path, pack(content + b"{\n"), f"corpus.jsonl{suffix}")
    with pytest.raises(ValueError, match=r"corpus\.jsonl\S+:51: no JSON"):
        read(bad)


def test_ranges_of_bytes_hold_each_line_once(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    texts = ["\u00e9" * int(n) for n in random.integers(0, 40, 200)]
    corpus = write(tmp_path, "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode())
    for size in (1, 7, 64, 1000, 1 << 20):
        monkeypatch.setattr(json_lines, "PART_BYTES", size)
        assert [document.content for document in read(corpus)] == [text for text in texts if text]
        assert sum(part.size for part in find_source(SourceConfig(corpus=corpus)).parts()) == len(
            (tmp_path / "corpus.jsonl").read_bytes()
        )


def test_a_folder_of_files_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/2.jsonl", "b/1.jsonl", "a.jsonl"):
        write(tmp_path, json.dumps({"text": name}).encode(), name)
    write(tmp_path, gzip.compress(b'{"text": "packed"}'), "c.json.gz")
    write(tmp_path, b"not looked at", ".hidden")
    found = read(str(tmp_path))
    assert [document.content for document in found] == ["a.jsonl", "b/1.jsonl", "b/2.jsonl", "packed"]


def test_sources_of_documents(tmp_path):
    corpus = write(
        tmp_path,
        b'{"text": "x", "meta": {"set": "books"}, "meta.set": "flat"}\n{"text": "y", "meta": {"set": "web"}}\n',
    )
    assert [document.source for document in read(corpus, source_field="meta.set")] == ["flat", "web"]
    assert [document.source for document in read(corpus)] == [None, None]
    for field, message in [
        ("set", r":1: no field 'set' that names the source, only 'text', 'meta', 'meta\.set'"),
        ("meta", r":1: field 'meta' holds \{'set': 'books'\}, not the name of a source"),
        ("text.set", r":1: no field 'text\.set' that names the source, only str"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(corpus, source_field=field)


def test_the_first_documents_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "PART_BYTES", 20)
    corpus = write(tmp_path, b"".join(b'{"text": "%d"}\n' % i for i in range(10)) + b"{")
    assert [document.content for document in read(corpus, max_documents=7)] == list("0123456")


def ids_of(documents):
    return [document.content.tolist() for document in documents]


def test_ready_made_ids(tmp_path):
    lines = [
        {"input_ids": [5, 6, 7]},
        {
            "input_ids": [1, 2, 3, 4, 5],
            "labels": 9,
            "source": [{"source": "C4", "start": 0, "end": 2}, {"source": "Book", "end": 5}],
        },
        {"input_ids": [1, 2], "source": [{"end": 1}, {"end": 1}, {"end": 2}]},
        {"input_ids": []},
        {"input_ids": [8], "source": "a name"},
    ]
    corpus = write(tmp_path, "\n".join(map(json.dumps, lines)).encode())
    skipped = Skipped()
    found = list(read_documents(SourceConfig(corpus=corpus), skipped))
    assert ids_of(found) == [[5, 6, 7], [1, 2], [3, 4, 5], [1], [2], [8]]
    assert skipped.empty == 2
    assert found[2].where == f"{corpus}:2, document 2"
    named = write(tmp_path, json.dumps(lines[1]).encode(), "named.jsonl")
    assert [document.source for document in read(named, source_field="source")] == ["C4", "Book"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"input_ids": [1, 2], "source": [{"end": 2}, {"end": 1}]},
            "document 2 of 'source' ends at 1, before its start at 2",
        ),
        ({"input_ids": [1, 2], "source": [{"end": 3}]}, "document 1 of 'source' ends at 3, but there are 2 ids"),
        ({"input_ids": [1, 2], "source": [{"end": -1}]}, "ends at -1, before its start at 0"),
        ({"input_ids": [1, 2], "source": [{"end": 1}]}, "end at 1, but there are 2 ids: the last 1 belong to none"),
        ({"input_ids": [1, 2], "source": [{"end": "2"}]}, "ends at '2', no whole number"),
        ({"input_ids": [1, 2], "source": [{"start": 1, "end": 2}]}, "starts at 1, but the one before it ends at 0"),
        ({"input_ids": [1, 2], "source": [2]}, r"field 'source' is no list of objects such as \{'end': 512\}"),
        ({"input_ids": [1, 2], "source": {"end": 2}}, "field 'source' is no list of objects"),
        ({"input_ids": [1.5, 2]}, "field 'input_ids' is no list of whole numbers"),
        ({"input_ids": [[1], [2, 3]]}, "field 'input_ids' is no list of whole numbers"),
        ({"input_ids": "12"}, "field 'input_ids' is no list of whole numbers"),
        ({"input_ids": [1, None]}, "field 'input_ids' is no list of whole numbers"),
        ({"ids": [1]}, "no field 'text', only 'ids'"),
    ],
)
def test_bad_ids_and_borders(tmp_path, record, message):
    corpus = write(tmp_path, b'{"input_ids": [1]}\n' + json.dumps(record).encode())
    with pytest.raises(ValueError, match=rf"data\.corpus: .*corpus\.jsonl:2: .*{message}"):
        read(corpus)
