import json
import multiprocessing
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from datamodules import token_store
from datamodules.config import DataConfig
from datamodules.token_store import TokenStore
from datamodules.tokenizers import load_tokenizer

TEXTS = ["one", "", "zwei \u00e9", "3" * 1000]


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text, "body": text.upper()}) + "\n" for text in TEXTS))
    return DataConfig(corpus=str(file))


def test_documents_with_their_end_and_nothing_else(tmp_path, config):
    store = TokenStore.open_or_build(tmp_path / "home", config, load_tokenizer("byte"))
    expected = [[*text.encode(), 257] for text in TEXTS if text]
    assert [store.document(i).tolist() for i in range(3)] == expected
    assert store.tokens.tolist() == [token for ids in expected for token in ids]
    assert store.tokens.dtype == np.uint16
    assert store.lengths.tolist() == [len(ids) for ids in expected]
    assert store.ends.tolist() == np.cumsum(store.lengths).tolist()
    assert store.report() == {"documents": 3, "tokens": 1013, "empty_documents": 1, "undecodable_documents": 0}


def test_no_end_of_document(tmp_path, config):
    store = TokenStore.open_or_build(tmp_path, config, load_tokenizer("byte", None, ""))
    assert store.document(0).tolist() == list(b"one")


def test_large_vocabularies_take_32_bits(tmp_path, config):
    wide = SimpleNamespace(
        vocabulary_size=1 << 17,
        digest="wide",
        end_id=100_000,
        encode_batch=lambda texts: [np.array([70_000 + len(text)], np.uint32) for text in texts],
    )
    store = TokenStore.open_or_build(tmp_path, config, wide)
    assert store.tokens.dtype == np.uint32
    assert store.tokens.tolist() == [70_003, 100_000, 70_006, 100_000, 71_000, 100_000]


def test_batches_do_not_show(tmp_path, config, monkeypatch):
    whole = TokenStore.open_or_build(tmp_path / "whole", config, load_tokenizer("byte"))
    monkeypatch.setattr(token_store, "_BATCH_DOCUMENTS", 1)
    single = TokenStore.open_or_build(tmp_path / "single", config, load_tokenizer("byte"))
    assert (whole.tokens == single.tokens).all() and (whole.ends == single.ends).all()


def test_found_only_when_built_and_only_for_what_it_was_made_of(tmp_path, config):
    home, tokenizer = tmp_path / "home", load_tokenizer("byte")
    assert TokenStore.find(home, config, tokenizer) is None
    assert not home.exists()
    built = TokenStore.open_or_build(home, config, tokenizer)
    same = replace(config, context_length=17, packing="best_fit", shuffle_seed=5)
    assert TokenStore.find(home, same, tokenizer).directory == built.directory
    assert TokenStore.find(home, replace(config, text_field="body"), tokenizer) is None
    assert TokenStore.find(home, config, load_tokenizer("byte", None, "")) is None
    with open(config.corpus, "a") as file:
        file.write('{"text": "more"}\n')
    assert TokenStore.find(home, config, tokenizer) is None
    assert [path.name for path in (home / "tokens").iterdir()] == [built.directory.name]


def test_a_second_call_tokenises_nothing(tmp_path, config):
    tokenizer = load_tokenizer("byte")
    first = TokenStore.open_or_build(tmp_path, config, tokenizer)
    idle = SimpleNamespace(vocabulary_size=258, digest=tokenizer.digest, end_id=257)  # has no encode_batch
    assert TokenStore.open_or_build(tmp_path, config, idle).directory == first.directory


@pytest.mark.parametrize("content", ['{"text": "fine"}\n{"text": 3}\n', '{"text": ""}\n', ""])
def test_a_bad_corpus_leaves_nothing_behind(tmp_path, content):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(content)
    with pytest.raises(ValueError, match=r"data\.corpus"):
        TokenStore.open_or_build(tmp_path / "new" / "home", DataConfig(corpus=str(corpus)), load_tokenizer("byte"))
    assert list(tmp_path.iterdir()) == [corpus]


def test_a_store_that_is_not_whole_is_built_again(tmp_path, config):
    tokenizer = load_tokenizer("byte")
    store = TokenStore.open_or_build(tmp_path, config, tokenizer)
    tokens = store.tokens.tolist()
    (store.directory / "tokens.bin").write_bytes(b"\0\0")
    assert TokenStore.find(tmp_path, config, tokenizer) is None
    assert TokenStore.open_or_build(tmp_path, config, tokenizer).tokens.tolist() == tokens


def test_a_build_killed_half_way_is_no_store(tmp_path, config):
    code = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from datamodules.config import DataConfig
from datamodules.token_store import TokenStore
from datamodules.tokenizers import load_tokenizer
byte = load_tokenizer("byte")
dying = SimpleNamespace(vocabulary_size=258, digest=byte.digest, end_id=257, encode_batch=lambda texts: os._exit(9))
TokenStore.open_or_build(Path(sys.argv[1]), DataConfig(corpus=sys.argv[2]), dying)
"""
    home = tmp_path / "home"
    assert subprocess.run([sys.executable, "-c", code, str(home), config.corpus]).returncode == 9
    tokenizer = load_tokenizer("byte")
    assert TokenStore.find(home, config, tokenizer) is None
    store = TokenStore.open_or_build(home, config, tokenizer)
    assert list((home / "tokens").iterdir()) == [store.directory]


def _build_slowly(home, config, log):
    tokenizer = load_tokenizer("byte")

    def encode_batch(texts):
        log.put("built")
        time.sleep(0.3)
        return tokenizer.encode_batch(texts)

    slow = SimpleNamespace(vocabulary_size=258, digest=tokenizer.digest, end_id=257, encode_batch=encode_batch)
    log.put(TokenStore.open_or_build(home, config, slow).tokens.tolist())


def test_two_processes_want_the_same_store(tmp_path, config):
    context = multiprocessing.get_context("fork")
    log = context.Queue()
    workers = [context.Process(target=_build_slowly, args=(tmp_path, config, log)) for _ in range(3)]
    for worker in workers:
        worker.start()
    entries = [log.get(timeout=20) for _ in range(4)]
    for worker in workers:
        worker.join()
    assert entries.count("built") == 1
    stores = [entry for entry in entries if entry != "built"]
    assert stores[0] == stores[1] == stores[2]


def test_pickled_as_a_path(tmp_path, config):
    store = TokenStore.open_or_build(tmp_path, config, load_tokenizer("byte"))
    pickled = pickle.dumps(store)
    assert len(pickled) < 500
    assert pickle.loads(pickled).tokens.tolist() == store.tokens.tolist()
