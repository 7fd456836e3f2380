"""Datasets of the library `datasets`. The hub itself cannot be reached here: its names are tried on the library's own
cache, laid out as a download leaves it, and streams on a folder that the library reads as it reads a repository."""

import shutil

import datasets
import pytest

from datamodules.sources import hugging_face
from datamodules.sources.config import SourceConfig
from datamodules.sources.file_digests import FileDigests
from datamodules.sources.find import find_source, read_documents

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def read(corpus, **settings):
    return list(read_documents(SourceConfig(corpus=str(corpus), **settings)))


@pytest.fixture
def dataset():
    texts = [f"document {i}" for i in range(2500)]
    return datasets.Dataset.from_dict(
        {"text": texts, "set": ["ab"[i % 2] for i in range(2500)], "more": [[i] for i in range(2500)]}
    )


def test_saved_on_disk(tmp_path, dataset):
    dataset.save_to_disk(tmp_path / "saved", num_shards=2)
    found = read(tmp_path / "saved", source_field="set")
    assert [document.content for document in found] == dataset["text"][:]
    assert [document.source for document in found[:3]] == ["a", "b", "a"]
    assert found[2000].where.endswith("data-00001-of-00002.arrow, row 751")
    chosen = dataset.select([7, 3, 900])  # an indices table, which saving resolves
    chosen.save_to_disk(tmp_path / "chosen")
    assert [document.content for document in read(tmp_path / "chosen")] == ["document 7", "document 3", "document 900"]


def test_saved_splits(tmp_path, dataset):
    datasets.DatasetDict({"train": dataset.select(range(3)), "test": dataset.select([9])}).save_to_disk(
        tmp_path / "both"
    )
    assert [document.content for document in read(tmp_path / "both", split="test")] == ["document 9"]
    assert len(read(tmp_path / "both")) == 3
    with pytest.raises(ValueError, match=r"data\.split='validation': .*both has train, test\. Set one of them"):
        read(tmp_path / "both", split="validation")
    keys = [
        str(find_source(SourceConfig(corpus=str(tmp_path / "both"), split=split)).key(FileDigests()))
        for split in ("train", "test")
    ]
    assert keys[0] != keys[1]


def test_saved_and_damaged(tmp_path, dataset):
    dataset.save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"data\.corpus: .*saved"):
        read(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"no column 'body', only 'text', 'set', 'more'"):
        dataset.save_to_disk(tmp_path / "whole")
        read(tmp_path / "whole", text_field="body")


@pytest.fixture
def hub(tmp_path, monkeypatch, dataset):
    """The library's cache with org/name in it, and no net."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    dataset.to_json(tmp_path / "files" / "train.jsonl")
    datasets.load_dataset(str(tmp_path / "files"), cache_dir=str(tmp_path / "made"))
    (made,) = (tmp_path / "made").glob("*/*/*/*/dataset_info.json")
    target = tmp_path / "cache" / "org___name" / "default" / "0.0.0" / COMMIT
    target.parent.mkdir(parents=True)
    shutil.copytree(made.parent, target)
    for file in target.glob("*.arrow"):  # named after the repository
        file.rename(target / file.name.replace(file.name.partition("-train")[0], "name"))
    return "hub:org/name"


def test_a_downloaded_dataset_of_the_hub(hub, dataset):
    assert [document.content for document in read(hub)] == dataset["text"][:]
    assert find_source(SourceConfig(corpus=hub)).key(FileDigests())[:5] == ["hub", "org/name", None, "train", COMMIT]
    assert len(read(hub, max_documents=5)) == 5
    assert len(read(hub, revision=COMMIT)) == 2500
    with pytest.raises(
        ValueError, match=rf"org/name at commit f{{40}} is not at hand; the library's cache holds {COMMIT}"
    ):
        read(hub, revision="f" * 40)
    with pytest.raises(ValueError, match=r"data\.corpus: hub:org/name cannot be loaded: .*Available configs"):
        read(hub, subset="german")
    with pytest.raises(ValueError, match=r"data\.corpus: hub:org/name cannot be loaded: .*nosuch"):
        read(hub, split="nosuch")


def test_a_dataset_that_is_nowhere(hub):
    with pytest.raises(ValueError, match=r"data\.corpus: hub:org/other cannot be loaded: .*(reach|offline|find)"):
        read("hub:org/other")


def test_a_stream_is_read_shard_by_shard(tmp_path, dataset, monkeypatch):
    (tmp_path / "files").mkdir()
    for shard in range(3):
        dataset.shard(3, shard, contiguous=True).to_parquet(tmp_path / "files" / f"train-{shard}.parquet")
    monkeypatch.setattr(hugging_face, "_arguments", lambda config: {"path": str(tmp_path / "files")})
    config = SourceConfig(corpus="hub:org/name", streaming=True, source_field="set")
    source = find_source(config)
    assert isinstance(source, hugging_face.StreamedDataset)
    assert len(source.parts()) == 3
    found = list(read_documents(config))
    assert [document.content for document in found] == dataset["text"][:]
    assert [document.source for document in found[:2]] == ["a", "b"]
    assert len(read("hub:org/name", streaming=True, max_documents=900)) == 900
