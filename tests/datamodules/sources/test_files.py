import os
import sysconfig
import tokenize
from pathlib import Path

import pytest

from datamodules.sources import files
from datamodules.sources.config import SourceConfig
from datamodules.sources.file_digests import FileDigests
from datamodules.sources.find import find_source, own_name, read_documents
from datamodules.sources.source import Document, Skipped, grouped


def read(corpus, **settings):
    return list(read_documents(SourceConfig(corpus=str(corpus), **settings)))


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("missing.jsonl", r"cannot read .*missing\.jsonl \(no such file or folder\)"),
        ("missing/folder", r"cannot read missing/folder \(no such file or folder\).*python_stdlib"),
        ("notes.txt", r"notes\.txt is no corpus: a file must be \.jsonl, \.jsonl\.gz, .*name the folder of all"),
        ("empty", r"the folder .*empty holds no files"),
        ("mixed", r"mixed holds files of several kinds, such as a\.jsonl and b\.txt.*data\.sources"),
        ("binary", r"binary/a\.bin, byte 0: no UTF-8 .*move what is no text out of the folder"),
        ("hub:a b", r"data\.corpus='hub:a b' is no name of a hub dataset"),
    ],
)
def test_corpora_that_are_none(tmp_path, monkeypatch, corpus, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "mixed", "binary"):
        (tmp_path / folder).mkdir()
    for name in ("notes.txt", "mixed/a.jsonl", "mixed/b.txt", "mixed/.hidden.parquet"):
        (tmp_path / name).write_text("x")
    (tmp_path / "binary/a.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=message):
        read(corpus)


def test_an_unreadable_file(tmp_path):
    (tmp_path / "folder.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"data\.corpus: cannot read"):
        find_source(SourceConfig(corpus=str(tmp_path / "folder.jsonl"))).key(FileDigests())


def test_a_folder_of_text_files(tmp_path):
    for name, text in {
        "web/2.md": "two",
        "web/deep/3": "three",
        "books/1.txt": "\ufeffone",
        "0.txt": "zero",
        "e.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("hidden")
    skipped = Skipped()
    assert list(read_documents(SourceConfig(corpus=str(tmp_path), source_field="folder"), skipped)) == [
        Document("zero", None, "0.txt"),
        Document("one", "books", "books/1.txt"),
        Document("two", "web", "web/2.md"),
        Document("three", "web", "web/deep/3"),
    ]
    assert skipped.empty == 1
    assert {document.source for document in read(tmp_path)} == {None}
    with pytest.raises(ValueError, match=r"data\.source_field='meta': files of text have no fields\. Set folder"):
        read(tmp_path, source_field="meta")


def test_the_standard_library():
    """Oracle: pathlib's own walk, filtered by what is left out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not left_out & set(path.relative_to(root).parts) and path.is_file() and path.stat().st_size
    )
    skipped = Skipped()
    found = list(read_documents(SourceConfig(), skipped))
    assert [document.where for document in found] == names
    assert len(names) > 100 and skipped.undecodable == 0
    by_name = {document.where: document.content for document in found}
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
    monkeypatch.setattr(files.sysconfig, "get_path", lambda name: str(tmp_path))
    skipped = Skipped()
    assert list(read_documents(SourceConfig(), skipped)) == [
        Document("# -*- coding: latin-1 -*-\n# \u00e9\n", None, "a/latin.py"),
        Document("x = 1\n", None, "b.py"),
    ]
    assert skipped == Skipped(empty=1, undecodable=2)


def test_a_python_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(files.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.corpus=python_stdlib.*keeps no source files"):
        read("python_stdlib")


def key(file, digests=None):
    return find_source(SourceConfig(corpus=str(file))).key(digests or FileDigests())


def test_the_key_follows_content_and_not_the_place(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"text": "a"}\n')
    two.write_text('{"text": "b"}\n')
    assert key(one) != key(two)
    two.write_text('{"text": "a"}\n')
    assert key(one) == key(two)
    limited = find_source(SourceConfig(corpus=str(one), max_documents=1)).key(FileDigests())
    other_field = find_source(SourceConfig(corpus=str(one), text_field="body")).key(FileDigests())
    assert len({str(each) for each in (key(one), limited, other_field)}) == 3
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text("same")
    (tmp_path / "a/2.txt").write_text("same")
    (tmp_path / "b/2.txt").write_text("same")
    assert key(tmp_path / "a") != key(tmp_path / "b")  # names of several files decide their order


def test_content_is_hashed_again_only_when_a_file_may_have_changed(tmp_path, monkeypatch):
    memory, file = tmp_path / "memory", tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n')
    fresh = FileDigests(memory)
    first = key(file, fresh)
    fresh.save()
    assert not memory.exists(), "a file that was just written is not trusted"

    monkeypatch.setattr("datamodules.sources.file_digests._AT_REST_NANOSECONDS", 0)
    rested = FileDigests(memory)
    assert key(file, rested) == first
    rested.save()
    (entry,) = memory.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
        assert key(file, FileDigests(memory)) == first
    stat = file.stat()
    file.write_text('{"text": "b"}\n')
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time: only the inode's change tells
    assert key(file, FileDigests(memory)) != first
    entry.write_text("broken")
    assert key(file, FileDigests(memory)) == key(file)


def test_parts_are_neighbours_of_about_one_size():
    assert grouped([3, 3, 9, 1], 6) == [(0, 2), (2, 3), (3, 4)]
    assert grouped([], 6) == []
    assert grouped([0, 0, 0], 6) == [(0, 3)]


def test_own_names():
    names = ["books/part-1.jsonl.zst", "hub:org/name", "/data/web/", "python_stdlib"]
    assert [own_name(name) for name in names] == ["part-1", "name", "web", "python_stdlib"]
