"""`workbench bench`: the shape of its rows, its ratios, its refusals. No time is tested."""

import json
import sys

import numpy as np
import pytest
import torch

from workbench.bench.rows import log_normal_lengths, random_row
from workbench.cli import main


def rows_of(capsys, *words: str) -> list[dict]:
    assert main(["bench", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_lengths_are_log_normal_and_fill_the_row():
    lengths = log_normal_lengths(200_001, mean=500, sigma=0.5, seed=1)
    assert len(lengths) == 400
    assert lengths.sum() == 200_000
    assert lengths.min() >= 1
    assert abs(np.log(lengths).std() - 0.5) < 0.06
    assert np.array_equal(lengths, log_normal_lengths(200_001, mean=500, sigma=0.5, seed=1))


@pytest.mark.parametrize(
    ("tokens", "mean", "expected"), [(2, 1000, [1]), (7, 2, [2, 2, 2]), (4, 1, [1, 1, 1]), (5, 0.1, [1] * 4)]
)
def test_lengths_of_small_rows(tokens, mean, expected):
    assert log_normal_lengths(tokens, mean=mean, sigma=0, seed=0).tolist() == expected


def test_a_row_has_labels_and_positions_of_training():
    batch = random_row(np.array([3, 2]), vocabulary_size=50, positions="reset", seed=0)
    token = batch.tokens_BT[0].tolist()
    assert batch.document_BT.tolist() == [[0, 1, 1, 1, 2, 2]]
    assert batch.labels_BT.tolist() == [[-100, token[2], token[3], -100, token[5], -100]]
    assert batch.position_BT.tolist() == [[0, 1, 2, 3, 1, 2]]


def test_attention_rows(capsys):
    words = ["attention", "--tokens", "65", "--documents-mean", "16", "--sigma", "0", "--rounds", "2"]
    rows = rows_of(capsys, *words, "--strategies", "full", "anchor", "--kernels", "sdpa", "reference")
    assert [(row["kernel"], row["strategy"]) for row in rows] == [
        (kernel, strategy) for kernel in ("sdpa", "reference") for strategy in ("full", "anchor")
    ]
    for row in rows:
        assert row["documents"] == 4 and row["seconds"] > 0 and row["peak_bytes"] > 65 * 8 * 32 * 4
        # 65 * 66 / 2 pairs; anchor: 1 + 4 documents of 16 * 17 / 2 + 16.
        assert row["ideal_speedup"] == pytest.approx(1 if row["strategy"] == "full" else 2145 / 609)
        assert row["achieved"] == pytest.approx(row["speedup"] / row["ideal_speedup"])
    assert rows[0]["speedup"] == rows[2]["speedup"] == 1
    assert rows[1]["bare_ratio"] > 0 and rows[3]["bare_ratio"] is None


def test_what_cannot_be_served_is_listed_with_its_reason(capsys):
    """By default every kernel but the oracle is listed; without a GPU, or in float32, flash and varlen serve nobody."""
    words = ["attention", "--tokens", "65", "--rounds", "1", "--strategies", "sink_window"]
    rows = rows_of(capsys, *words)
    refused = [row for row in rows if row["kernel"] in ("flash", "varlen", "sdpa")]
    assert [row["kernel"] for row in refused] == ["flash", "varlen", "sdpa"]
    for row in refused:
        assert row["why"].endswith(".")
        for key in ("seconds", "peak_bytes", "speedup", "ideal_speedup", "achieved"):
            assert row[key] is None


def test_step_rows_beside_transformers(capsys):
    """Before it measures, the bench itself holds both to one loss."""
    rows = rows_of(capsys, "step", "--tokens", "128", "--rounds", "1", "--peer", "transformers")
    assert {row["subject"] for row in rows} == {"workbench", "transformers"}
    assert {row["strategy"] for row in rows} == {"full", "intra_document", "intra_document_reset", "anchor"}
    assert all(row["ratio"] == 1 for row in rows if row["subject"] == "workbench")
    assert all(row["seconds"] > 0 and row["tokens"] == 128 for row in rows)


def test_step_rows_by_precision(capsys):
    words = ["step", "--tokens", "128", "--rounds", "1", "--strategies", "full", "--precisions"]
    words += ["bf16-true", "bf16-mixed"]
    rows = rows_of(capsys, *words)
    assert [(row["precision"], row["bfloat16_products"]) for row in rows] == [
        ("32-true", None),
        ("bf16-true", "native"),
        ("bf16-true", "float32"),
        ("bf16-mixed", "native"),
        ("bf16-mixed", "float32"),
    ]


def test_step_rows_beside_litgpt(capsys):
    """LitGPT has no documents, so it stands beside `full` alone; the bench itself holds both to one loss."""
    pytest.importorskip("litgpt", reason="litgpt is optional: pip install --no-deps litgpt psutil")
    words = ["step", "--tokens", "128", "--rounds", "1", "--strategies", "full", "anchor", "--peer", "litgpt"]
    rows = rows_of(capsys, *words)
    assert [(row["subject"], row["strategy"]) for row in rows] == [
        ("workbench", "full"),
        ("litgpt", "full"),
        ("workbench", "anchor"),
    ]


def test_a_missing_peer_says_how_to_install_it(monkeypatch, capsys):
    for name in ("litgpt", "litgpt.config"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["bench", "step", "--tokens", "128", "--peer", "litgpt"]) == 2
    assert "pip install --no-deps litgpt psutil" in capsys.readouterr().err


def test_a_peer_that_trains_something_else_is_not_compared(monkeypatch, capsys):
    from workbench.bench import peers

    def shifted(ours, batch):
        return peers.transformers(ours, batch._replace(labels_BT=batch.labels_BT.roll(1, dims=1)))

    monkeypatch.setitem(peers.PEERS, "transformers", shifted)
    assert main(["bench", "step", "--tokens", "128", "--rounds", "1", "--peer", "transformers"]) == 1
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
        (["attention", "--tokens", "64", "--kernels", "varlen"], "--kernels varlen: The varlen kernel"),
        (["step", "--peer", "megatron"], "--peer='megatron' is none of 'transformers', 'litgpt'"),
        (["step", "--strategies", "anchr"], "--strategies='anchr' is none of"),
        (["attention", "--documents-mean", "nan"], "--documents-mean nan must be at least 1"),
        (["attention", "--sigma", "inf", "--seed", "-1"], "--sigma inf must be at least 0.\n--seed -1 must be"),
        (["step", "--tokens", "9000", "--strategies", "sink_window"], "finds no kernel for"),
        (["step", "--tokens", "3"], "--tokens 3 must be at least 64"),
    ],
)
def test_mistakes_are_one_message(words, message, capsys):
    if "cuda" in words and torch.cuda.is_available():
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


@pytest.mark.slow
def test_data_figures(capsys):
    assert main(["bench", "data", "--documents", "1000", "--tokens", "200000", "--rounds", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures.pop("documents") == 1000
    assert set(figures) == {
        "plan_seconds", "plan_seconds_concatenate", "plan_seconds_best_fit", "row_tokens_per_second", "tokenize_ratio",
        "step_ratio",
    }  # fmt: skip
    assert all(0 < value < float("inf") for value in figures.values())
    assert figures["plan_seconds"] == max(figures["plan_seconds_concatenate"], figures["plan_seconds_best_fit"])


def test_a_bench_of_too_little_data_is_refused(capsys):
    assert main(["bench", "data", "--tokens", "5"]) == 2
    assert "--tokens 5 must be at least 200000" in capsys.readouterr().err
