import json
import sysconfig
import tokenize
from pathlib import Path

import pytest

from datamodules import documents
from datamodules.documents import CorpusCount, Document, corpus_digest, read_documents


def write(folder, content: bytes) -> str:
    file = folder / "corpus.jsonl"
    file.write_bytes(content)
    return str(file)


def test_jsonl_lines_become_documents(tmp_path):
    text = "one\u2028still one\n"  # U+2028 ends a line for str.splitlines, and not for JSON
    lines = [{"text": text, "id": 1}, {"text": ""}, {"text": "two \u00e9 \U0001f600"}]
    encoded = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    corpus = write(tmp_path, b"\xef\xbb\xbf" + encoded.encode() + b"\n\n   \n" + b'{"text": "three"}')
    count = CorpusCount()
    assert list(read_documents(corpus, "text", count)) == [
        Document(text, f"{corpus}:1"),
        Document("two \u00e9 \U0001f600", f"{corpus}:3"),
        Document("three", f"{corpus}:6"),
    ]
    assert (count.documents, count.empty) == (3, 1)


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
def test_a_bad_line_is_named(tmp_path, line, message):
    corpus = write(tmp_path, b'{"text": "ok"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        list(read_documents(corpus))


@pytest.mark.parametrize("ask", [corpus_digest, lambda corpus: list(read_documents(corpus))])
def test_corpora_that_are_none(tmp_path, ask):
    (tmp_path / "folder.jsonl").mkdir()
    for corpus in (str(tmp_path / "missing.jsonl"), str(tmp_path / "folder.jsonl")):
        with pytest.raises(ValueError, match=r"data\.corpus: cannot read"):
            ask(corpus)
    for corpus in ("wikipedia", str(tmp_path), "corpus.txt"):
        with pytest.raises(ValueError, match=r"data\.corpus=.*Set python_stdlib or the path of a \.jsonl file"):
            ask(corpus)


def test_the_digest_follows_the_bytes(tmp_path):
    one = corpus_digest(write(tmp_path, b'{"text": "a"}\n'))
    assert corpus_digest(write(tmp_path, b'{"text": "b"}\n')) != one
    assert corpus_digest(write(tmp_path, b'{"text": "a"}\n')) == one


def test_the_standard_library():
    """Oracle: pathlib's own walk, filtered by what is left out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not left_out & set(path.relative_to(root).parts) and path.is_file() and path.stat().st_size
    )
    count = CorpusCount()
    found = list(read_documents("python_stdlib", count=count))
    assert [document.name for document in found] == names
    assert count.documents == len(names) > 100 and count.undecodable == 0
    by_name = {document.name: document.text for document in found}
    with tokenize.open(root / "json/__init__.py") as stream:
        assert by_name["json/__init__.py"] == stream.read()


def test_files_of_the_library_that_do_not_decode_are_counted(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    for name, content in {
        "b.py": b"x = 1\n",
        "a/latin.py": b"# -*- coding: latin-1 -*-\n# \xe9\n",
        "bad.py": b"# \xff\n",
        "cookie.py": b"# coding: no-such-encoding\n",
        "empty.py": b"",
        "tests/x.py": b"y = 2\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(documents.sysconfig, "get_path", lambda name: str(tmp_path))
    count = CorpusCount()
    found = list(read_documents("python_stdlib", count=count))
    assert found == [Document("# -*- coding: latin-1 -*-\n# \u00e9\n", "a/latin.py"), Document("x = 1\n", "b.py")]
    assert count == CorpusCount(documents=2, empty=1, undecodable=2)


def test_a_python_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(documents.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.corpus=python_stdlib.*keeps no source files"):
        corpus_digest("python_stdlib")
