"""`workbench bench`: the shape of its rows, its ratios, its refusals. No time is tested."""

import json

import numpy as np
import pytest

from workbench.bench_attention import log_normal_documents
from workbench.cli import main


def rows_of(capsys, *words: str) -> list[dict]:
    assert main(["bench", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_documents_are_log_normal_and_fill_the_row():
    numbers = log_normal_documents(200_001, mean=500, sigma=0.5, seed=1)
    lengths = np.bincount(numbers)
    assert lengths[0] == 1 and numbers[0] == 0
    assert lengths.sum() == 200_001
    assert abs(lengths[1:-1].mean() - 500) < 50
    assert abs(np.log(lengths[1:-1]).std() - 0.5) < 0.06
    assert np.array_equal(numbers, log_normal_documents(200_001, mean=500, sigma=0.5, seed=1))


def test_attention_rows(capsys):
    words = ["attention", "--tokens", "65", "--documents-mean", "16", "--sigma", "0", "--rounds", "2"]
    rows = rows_of(capsys, *words, "--strategies", "full", "anchor", "--kernels", "sdpa", "reference", "varlen")
    assert [(row["kernel"], row["strategy"]) for row in rows] == [
        (kernel, strategy) for kernel in ("sdpa", "reference", "varlen") for strategy in ("full", "anchor")
    ]
    for row in rows[:4]:
        assert {"tokens", "documents", "seconds", "peak_bytes", "speedup", "ideal_speedup", "achieved"} <= row.keys()
        assert row["documents"] == 4 and row["seconds"] > 0 and row["peak_bytes"] > 65 * 8 * 32 * 4
        # 65 * 66 / 2 pairs; anchor: 1 + 4 documents of 16 * 17 / 2 + 16.
        assert row["ideal_speedup"] == pytest.approx(1 if row["strategy"] == "full" else 2145 / 609)
        assert row["achieved"] == pytest.approx(row["speedup"] / row["ideal_speedup"])
    assert rows[0]["speedup"] == rows[2]["speedup"] == 1
    assert rows[1]["bare_ratio"] > 0
    assert all("cuda" in row["why"] and "seconds" not in row for row in rows[4:])


def test_step_rows_beside_transformers(capsys):
    """Before it measures, the bench itself holds both to one loss."""
    rows = rows_of(capsys, "step", "--tokens", "128", "--rounds", "1", "--peer", "transformers")
    assert {row["subject"] for row in rows} == {"workbench", "transformers"}
    assert {row["strategy"] for row in rows} == {"full", "intra_document", "intra_document_reset", "anchor"}
    assert all(row["ratio"] == 1 for row in rows if row["subject"] == "workbench")
    assert all(row["seconds"] > 0 and row["tokens"] == 128 for row in rows)


def test_a_peer_that_trains_something_else_is_refused(monkeypatch, capsys):
    import workbench.bench as bench

    monkeypatch.setattr(bench, "PEERS", {"transformers": lambda s, t: bench._ours(s, "32-true", None, t // 2)})
    assert main(["bench", "step", "--tokens", "128", "--rounds", "1", "--peer", "transformers"]) == 2
    assert "trains something else" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attention", "--kernels", "sdpaa"], "Did you mean 'sdpa'?"),
        (["attention", "--strategies", "anchr"], "Did you mean 'anchor'?"),
        (["attention", "--tokens", "1"], "--tokens 1: a row has 2 tokens or more"),
        (["attention", "--heads", "3"], "--heads 3 must be a multiple of --kv-heads 4"),
        (["attention", "--dtype", "int8"], "--dtype='int8' is none of 'float32'"),
        (["attention", "--device", "cuda"], "torch finds no CUDA device"),
        (["step", "--peer", "megatron"], "--peer='megatron' is none of 'transformers'"),
        (["step", "--tokens", "3"], "--tokens 3 must be at least 64"),
    ],
)
def test_mistakes_are_one_message(words, message, capsys):
    if "cuda" in words:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_rows_can_be_logged(tmp_path, monkeypatch, capsys):
    from workbench.tracking import Tracker

    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    words = ["attention", "--tokens", "64", "--strategies", "anchor", "--kernels", "sdpa", "--rounds", "1", "--log"]
    rows = rows_of(capsys, *words)
    (run,) = Tracker(tmp_path, "bench").find({"kind": "bench"})
    assert run.info.status == "FINISHED"
    assert run.data.metrics["anchor/sdpa/seconds"] == pytest.approx(rows[0]["seconds"])
    assert run.data.params["heads"] == "8"
