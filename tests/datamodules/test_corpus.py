"""Token stores: what they hold, when they are found, and what is left of them after mistakes, kills and full disks."""

import json
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from datamodules import tokenising
from datamodules.config import DataConfig
from datamodules.corpus import Corpus
from datamodules.sources import json_lines
from datamodules.sources.config import SourceConfig
from datamodules.tokenizers import load_tokenizer

TEXTS = ["one", "", "zwei \u00e9", "3" * 1000]
BYTE = load_tokenizer("byte")


def lines(file, *records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def stand_in(**changes):
    """The byte tokenizer with some of it replaced."""
    own = {"vocabulary_size": 258, "digest": BYTE.digest, "anchor_id": 256, "end_id": 257, "library": ""}
    return SimpleNamespace(**{**own, "encode_batch": BYTE.encode_batch, **changes})


@pytest.fixture
def config(tmp_path):
    return DataConfig(corpus=lines(tmp_path / "corpus.jsonl", *({"text": t, "body": t.upper()} for t in TEXTS)))


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of a line or two, and processes from the first byte on."""
    monkeypatch.setattr(json_lines, "PART_BYTES", 40)
    monkeypatch.setattr(tokenising, "_LITTLE", 0)


def found(home, config, tokenizer=BYTE):
    return Corpus.find(home, config, tokenizer)[1]


def test_documents_with_their_end_and_nothing_else(tmp_path, config):
    corpus = Corpus.open_or_build(tmp_path / "home", config, BYTE)
    expected = [[*text.encode(), 257] for text in TEXTS if text]
    assert [corpus.document(i).tolist() for i in range(3)] == expected
    assert corpus.tokens[0].tolist() == [token for ids in expected for token in ids]
    assert corpus.tokens[0].dtype == np.uint16
    assert corpus.lengths.tolist() == [len(ids) for ids in expected]
    assert corpus.report() == {
        "documents": 3,
        "tokens": 1013,
        "empty_documents": 1,
        "undecodable_documents": 0,
        "removed_anchors": 0,
    }


def test_no_end_of_document(tmp_path, config):
    corpus = Corpus.open_or_build(tmp_path, config, load_tokenizer("byte", None, ""))
    assert corpus.document(0).tolist() == list(b"one")


def test_large_vocabularies_take_32_bits(tmp_path, config):
    wide = stand_in(
        vocabulary_size=1 << 17,
        end_id=100_000,
        encode_batch=lambda texts: [np.array([70_000 + len(text)], np.uint32) for text in texts],
    )
    corpus = Corpus.open_or_build(tmp_path, config, wide)
    assert corpus.tokens[0].dtype == np.uint32
    assert corpus.tokens[0].tolist() == [70_003, 100_000, 70_006, 100_000, 71_000, 100_000]


def test_batches_do_not_show(tmp_path, config, monkeypatch):
    whole = Corpus.open_or_build(tmp_path / "whole", config, BYTE)
    monkeypatch.setattr(tokenising, "_BATCH_DOCUMENTS", 1)
    single = Corpus.open_or_build(tmp_path / "single", config, BYTE)
    assert (whole.tokens[0] == single.tokens[0]).all() and (whole.lengths == single.lengths).all()


def test_several_processes_make_the_store_that_one_makes(tmp_path, small_parts):
    random = np.random.default_rng(0)
    records = [{"text": "x" * int(n), "kind": "abc"[n % 3]} for n in random.integers(0, 300, 60)]
    config = DataConfig(corpus=lines(tmp_path / "corpus.jsonl", *records), source_field="kind")
    alone = Corpus.open_or_build(tmp_path / "alone", replace(config, processes=1), BYTE)
    several = Corpus.open_or_build(tmp_path / "several", replace(config, processes=3), BYTE)
    names = ("tokens.bin", "ends.bin", "sources.bin", "header.json")
    (one,), (other,) = alone.stores.values(), several.stores.values()
    assert [(one.directory / name).read_bytes() for name in names] == [
        (other.directory / name).read_bytes() for name in names
    ]
    assert sorted(alone.table.sources) == ["a", "b", "c"]
    kinds = [record["kind"] for record in records if record["text"]]
    assert [alone.table.sources[i] for i in alone.table.source] == kinds


def test_found_only_when_built_and_only_for_what_it_was_made_of(tmp_path, config):
    home = tmp_path / "home"
    assert found(home, config) is None
    assert not home.exists()
    built = Corpus.open_or_build(home, config, BYTE)
    same = replace(config, context_length=17, packing="best_fit", shuffle_seed=5, processes=1)
    assert found(home, same).digest == built.digest
    assert found(home, replace(config, text_field="body")) is None
    assert found(home, config, load_tokenizer("byte", None, "")) is None
    assert found(home, config, stand_in(library="tokenizers 0.0")) is None
    with open(config.corpus, "a") as file:
        file.write('{"text": "more"}\n')
    assert found(home, config) is None


def test_a_second_call_tokenises_nothing(tmp_path, config):
    first = Corpus.open_or_build(tmp_path, config, BYTE)
    idle = stand_in(encode_batch=None)
    assert Corpus.open_or_build(tmp_path, config, idle).digest == first.digest


def test_several_sources_have_a_store_each_and_a_new_one_tokenises_no_other_again(tmp_path):
    code = SourceConfig(corpus=lines(tmp_path / "code.jsonl", {"text": "x=1"}, {"text": "y=2"}))
    prose = SourceConfig(corpus=lines(tmp_path / "prose.jsonl", {"text": "hello"}))
    home = tmp_path / "home"
    Corpus.open_or_build(home, DataConfig(sources={"code": code}), BYTE)
    tokenised = []
    watching = stand_in(encode_batch=lambda texts: tokenised.extend(texts) or BYTE.encode_batch(texts))
    both = Corpus.open_or_build(home, DataConfig(sources={"code": code, "prose": prose}), watching)
    assert tokenised == ["hello"]
    assert [BYTE.decode(both.document(i)) for i in range(3)] == ["x=1<eos>", "y=2<eos>", "hello<eos>"]
    assert [both.table.sources[i] for i in both.table.source] == ["code", "code", "prose"]


def test_ready_made_ids_are_taken_as_they_are_but_for_a_leading_anchor(tmp_path):
    record = {"input_ids": [256, 1, 2, 257, 3, 256, 4], "source": [{"end": 4}, {"end": 7}]}
    corpus = Corpus.open_or_build(tmp_path, DataConfig(corpus=lines(tmp_path / "ids.jsonl", record)), BYTE)
    assert [corpus.document(i).tolist() for i in range(2)] == [[1, 2, 257], [3, 256, 4]]
    assert corpus.report()["removed_anchors"] == 1


@pytest.mark.parametrize("token", [-1, 258])
def test_ids_outside_the_vocabulary_are_refused_with_their_place(tmp_path, token):
    config = DataConfig(corpus=lines(tmp_path / "ids.jsonl", {"input_ids": [1]}, {"input_ids": [1, token]}))
    with pytest.raises(ValueError, match=rf"ids\.jsonl:2: id {token} at place 1 is none of the 258 of"):
        Corpus.open_or_build(tmp_path / "home", config, BYTE)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("content", ['{"text": "fine"}\n{"text": 3}\n', '{"text": ""}\n', ""])
def test_a_bad_corpus_leaves_nothing_behind(tmp_path, content):
    file = tmp_path / "corpus.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"corpus"):
        Corpus.open_or_build(tmp_path / "new" / "home", DataConfig(corpus=str(file)), BYTE)
    assert list(tmp_path.iterdir()) == [file]


def test_documents_that_are_not_accepted_leave_nothing_behind(tmp_path, config):
    def refuse(table):
        raise ValueError(f"no row of {table.lengths.sum()} tokens")

    with pytest.raises(ValueError, match="no row of 1013 tokens"):
        Corpus.open_or_build(tmp_path / "home", config, BYTE, accept=refuse)
    assert not (tmp_path / "home").exists()


def test_a_store_that_is_not_whole_is_built_again(tmp_path, config):
    corpus = Corpus.open_or_build(tmp_path, config, BYTE)
    tokens = corpus.tokens[0].tolist()
    (store,) = corpus.stores.values()
    (store.directory / "tokens.bin").write_bytes(b"\0\0")
    assert found(tmp_path, config) is None
    assert Corpus.open_or_build(tmp_path, config, BYTE).tokens[0].tolist() == tokens


DYING = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from datamodules.config import DataConfig
from datamodules.corpus import Corpus
from datamodules.sources import json_lines
from datamodules.tokenizers import load_tokenizer
json_lines.PART_BYTES = 40
byte = load_tokenizer("byte")
def encode_batch(texts):
    if len(texts[0]) == 1000:
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
    return byte.encode_batch(texts)
dying = SimpleNamespace(vocabulary_size=258, digest=byte.digest, anchor_id=256, end_id=257, library="",
                        encode_batch=encode_batch)
Corpus.open_or_build(Path(sys.argv[1]), DataConfig(corpus=sys.argv[2], processes=1), dying)
"""


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGINT"])
def test_a_build_that_is_killed_or_interrupted_is_no_store_and_goes_on_from_its_parts(
    tmp_path, config, small_parts, kind
):
    home = tmp_path / "home"
    ended = subprocess.run(
        [sys.executable, "-c", DYING, str(home), config.corpus, kind], capture_output=True, text=True
    )
    assert ended.returncode == -getattr(signal, kind), ended.stderr
    assert found(home, config) is None
    tokenised = []
    watching = stand_in(encode_batch=lambda texts: tokenised.extend(texts) or BYTE.encode_batch(texts))
    corpus = Corpus.open_or_build(home, replace(config, processes=1), watching)
    assert tokenised == ["3" * 1000]
    assert BYTE.decode(corpus.tokens[0]) == "".join(text + "<eos>" for text in TEXTS if text)
    (store,) = corpus.stores.values()
    assert [path for path in (home / "tokens").iterdir() if path.name != "digests"] == [store.directory]


def test_a_worker_process_that_is_killed_is_said_and_its_parts_are_kept(tmp_path, small_parts):
    corpus = lines(tmp_path / "corpus.jsonl", *({"text": letter * 9} for letter in "abcdef"))
    config = DataConfig(corpus=corpus, processes=2)
    with pytest.raises(ChildProcessError, match=r"was killed.*data\.processes=2"):
        Corpus.open_or_build(tmp_path / "home", config, DiesOn("e" * 9))
    assert found(tmp_path / "home", config) is None
    whole = Corpus.open_or_build(tmp_path / "home", config, BYTE)
    assert BYTE.decode(whole.tokens[0]) == "".join(letter * 9 + "<eos>" for letter in "abcdef")


class DiesOn:
    """The byte tokenizer in a process that is killed at one text. Pickles."""

    vocabulary_size, digest, anchor_id, end_id, library = 258, BYTE.digest, 256, 257, ""

    def __init__(self, text):
        self.text = text

    def encode_batch(self, texts):
        if self.text in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return BYTE.encode_batch(texts)


def _build_on_a_small_disk(home, config, log):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
    try:
        Corpus.open_or_build(home, config, BYTE)
    except OSError as error:
        log.put(str(error))


def test_a_full_disk_leaves_the_old_store_and_says_how_much_room_is_needed(tmp_path, config):
    home = tmp_path / "home"
    old = Corpus.open_or_build(home, config, BYTE).tokens[0].tolist()
    large = DataConfig(corpus=lines(tmp_path / "large.jsonl", *({"text": "x" * 5000} for _ in range(20))))
    context = multiprocessing.get_context("fork")
    log = context.Queue()
    process = context.Process(target=_build_on_a_small_disk, args=(home, large, log))
    process.start()
    message = log.get(timeout=60)
    process.join()
    assert "no room for the tokens of" in message and "MB" in message and "WORKBENCH_HOME" in message
    assert found(home, large) is None
    assert not list((home / "tokens").glob("*.partial"))
    assert found(home, config).tokens[0].tolist() == old


def _build_slowly(home, config, log):
    def encode_batch(texts):
        log.put("built")
        time.sleep(0.3)
        return BYTE.encode_batch(texts)

    log.put(Corpus.open_or_build(home, config, stand_in(encode_batch=encode_batch)).tokens[0].tolist())


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


def test_pickled_as_paths(tmp_path, config):
    corpus = Corpus.open_or_build(tmp_path, config, BYTE)
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 500
    assert pickle.loads(pickled).tokens[0].tolist() == corpus.tokens[0].tolist()


def test_a_tokenizer_that_prepends_bos_by_itself_gives_none_here(tmp_path):
    """Specials are ours to place: the file's own post-processor must not add a second BOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "[UNK]": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    file = tmp_path / "tokenizer.json"
    backend.save(str(file))
    assert backend.encode("a b").ids == [0, 2, 3, 1]
    texts = DataConfig(corpus=lines(tmp_path / "corpus.jsonl", {"text": "a b"}))
    corpus = Corpus.open_or_build(tmp_path / "home", texts, load_tokenizer(str(file)))
    assert corpus.document(0).tolist() == [2, 3, 1]
