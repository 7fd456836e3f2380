"""`workbench probe` from the command line to JSON and to a real MLflow store read back."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from datamodules.tokenizers import load_tokenizer
from workbench.cli import main
from workbench.errors import UserError
from workbench.probe.sequences import as_rows, positions_in_documents, read_sequences
from workbench.probe.settings import PAPER, QUICK, ProbeSettings
from workbench.tracking import store_uri

SMALL = ["--tokens", "48", "--sequences", "2", "--shifts", "0", "3000", "--offsets", "0", "500"]


@pytest.fixture
def words(tmp_path):
    """A corpus of documents that are shorter and longer than a sequence."""
    file = tmp_path / "words.jsonl"
    texts = [f"document {i} says something about positions, again and again. " * (i % 4 + 1) for i in range(20)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


def probe(capsys, *arguments):
    """(JSON document, standard error)."""
    assert main(["probe", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_json_holds_every_condition_shift_and_length(home, words, capsys):
    document, err = probe(capsys, "debug", *SMALL, "--corpus", words, "--lengths", "16", "--mantissa-bits", "5")
    assert document["model"] == "debug"
    keys = ["tokens", "rotary_precision", "rotary_dtype", "dtype", "reference_shift", "shift", "deviation",
            "row_deviation", "first_token_share", "logit_deviation"]  # fmt: skip
    assert all(key in row for row in document["rows"] for key in keys)
    names = [(r["dtype"], r["rotary_dtype"], r["rotary_precision"], r["tokens"], r["shift"]) for r in document["rows"]]
    policies = ["float32_scores", "float32", "compute", "low_positions"]
    conditions = [("bfloat16", "bfloat16", policy) for policy in policies]
    conditions += [("float32", "float32", "float32"), ("float32", "e8m5", "emulated_both")]
    assert names == [(*c, tokens, shift) for c in conditions for tokens in (16, 48) for shift in (0, 3000)]
    assert len(document["consistency"]) == len(conditions) * 2
    assert "6 conditions x 2 sequences x 3 shifts: about" in err
    by_name = {name: row for name, row in zip(names, document["rows"], strict=True)}
    at = (48, 3000)
    wide = by_name["float32", "float32", "float32", *at]["row_deviation"]
    assert by_name["bfloat16", "bfloat16", "compute", *at]["row_deviation"] > 50 * wide
    assert by_name["float32", "e8m5", "emulated_both", *at]["row_deviation"] > 50 * wide


def test_mlflow_holds_numbers_tables_and_figures(home, words, capsys):
    document, _ = probe(capsys, "debug", *SMALL, "--corpus", words, "--formats", "e8m4", "e8m8")
    client = MlflowClient(store_uri(home))
    experiment = client.get_experiment_by_name("probe")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.tags["workbench.outcome"] == "completed"
    assert run.data.params["model"] == "debug" and run.data.params["tokens"] == "48"
    for row in (r for r in document["rows"] if r["tokens"] == 48):
        parts = [row["dtype"], row["rotary_dtype"], row["rotary_precision"]]
        label = "/".join(parts[:1] + parts[2:] if row["dtype"] == row["rotary_dtype"] else parts)
        for key in ("deviation", "row_deviation", "first_token_share"):
            points = {p.step: p.value for p in client.get_metric_history(run.info.run_id, f"{key}/{label}")}
            assert points[row["shift"]] == row[key], (key, label)
    points = client.get_metric_history(run.info.run_id, "consistency_kl/bfloat16/compute")
    assert [point.step for point in points] == [0, 500]
    figures = {item.path for item in client.list_artifacts(run.info.run_id, "figures")}
    names = ("shifts_tokens_lengths", "layers_and_heads", "first_token_share", "mantissa_bits")
    assert figures == {f"figures/{name}.png" for name in names}
    saved = json.loads(Path(client.download_artifacts(run.info.run_id, "probe.json")).read_text())
    assert saved["rows"] == document["rows"]
    heads = Path(client.download_artifacts(run.info.run_id, "tables/heads.csv")).read_text().splitlines()
    assert len(heads) == 1 + 7 * 2 * 4 * 4  # conditions, shifts, layers, heads


def test_numbers_repeat_bit_for_bit(home, words, capsys):
    arguments = ["debug", *SMALL, "--corpus", words, "--precisions", "compute", "--seed"]
    first = probe(capsys, *arguments, "3")[0]
    assert probe(capsys, *arguments, "3")[0] == first
    assert probe(capsys, *arguments, "4")[0] != first


def test_shared_mode_turns_one_pass(home, words, capsys):
    document, _ = probe(capsys, "debug", *SMALL, "--corpus", words, "--mode", "shared", "--offsets")
    found = {(row["dtype"], row["rotary_dtype"]) for row in document["rows"]}
    assert found == {("float32", "bfloat16"), ("float32", "float32")} and document["consistency"] == []


def test_the_table_fits_80_columns(home, words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["probe", "debug", *SMALL, "--corpus", words, "--formats", "tfloat32"]) == 0
    out = capsys.readouterr().out
    assert "float32/tfloat32/emulated_both" in out and "1st token" in out and "…" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_failed_probe_is_closed_as_failed(home, words, monkeypatch):
    """The store says what happened, whatever went wrong in the middle."""
    from workbench.probe import measure

    def broken(*_, **__):
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(measure, "compare_logits", broken)
    with pytest.raises(RuntimeError):
        main(["probe", "debug", *SMALL, "--corpus", words])
    client = MlflowClient(store_uri(home))
    (run,) = client.search_runs([client.get_experiment_by_name("probe").experiment_id])
    assert run.info.status == "FAILED" and "the disk is on fire" in run.data.tags["workbench.reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-of-that-name"], "names no model: no folder here, no preset"),
        (["debug", "--tokens", "4"], "--tokens 4: must be at least 8"),
        (["debug", "--shifts", "16"], "--shifts 16: is the reference shift"),
        (["debug", "--shifts", "-1"], "--shifts -1: must be at least 0"),
        (["debug", "--shifts", "7", "7"], "--shifts: the same number stands there twice"),
        (["debug", "--shifts", "16777216"], "exactly only up to 16777216"),
        (["debug", "--offsets", "16777216"], "exactly only up to 16777216"),
        (["debug", "--precisions", "exact"], "--precisions exact: is not known"),
        (["debug", "--dtypes", "int8"], "--dtypes int8: is not known"),
        (["debug", "--dtypes", "float16", "--shifts", "65500"], "float16, which ends at 65504"),
        (["debug", "--formats", "e9m3"], "--formats: number format 'e9m3'"),
        (["debug", "--mantissa-bits", "1"], "--formats: number format 'e8m1'"),
        (["debug", "--mode", "both"], "--mode both: is not known"),
        (["debug", "--lengths", "1000"], "--lengths 1000: must be from 2 to --tokens 512"),
        (["debug", "--max-memory", "0.2"], "--tokens 512: needs about"),
        (["debug", "--max-memory", "nan"], "--max-memory nan: must be a number"),
        (["debug", "--tokens", "100000", "--max-memory", "1"], "would fit. Fewer --shifts need less"),
        (["debug", "--corpus", "no.jsonl"], "cannot read no.jsonl"),
        (["debug", "--tokens", "1000000"], "needs about"),
        (["smollm2_135m", "--tokenizer", "no.json"], "cannot read no.json"),
        (["0" * 32], "no run of"),
    ],
)
def test_wrong_input_is_one_message_and_nothing_written(arguments, message, home, capsys, words):
    if "--corpus" not in arguments:
        arguments = [*arguments, "--corpus", words]
    assert main(["probe", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
    assert not home.exists()


def test_a_corpus_shorter_than_the_sequences(home, words, capsys):
    assert main(["probe", "debug", "--tokens", "4096", "--corpus", words, "--quick"]) == 2
    assert "tokens, which make 0 of the 1 sequences of 4096 tokens" in capsys.readouterr().err
    assert not home.exists()


def test_positions_beyond_float32_need_float64(home):
    """The yardstick's positions are multiplied in float64, which is exact much further."""
    far = dict(shifts=(2**25,), offsets=(), random_weights=False)
    with pytest.raises(UserError, match="16777216"):
        ProbeSettings(**far)
    ProbeSettings(**far, dtypes=("float64",))


def test_presets_of_settings_hold_their_rules():
    assert ProbeSettings(**QUICK).sequences == 1
    paper = ProbeSettings(**PAPER)
    assert paper.reference_shift == 16 and len(paper.shifts) == 19 and paper.all_lengths()[-2:] == (4096, 8192)
    assert {"given", "random"} == {c.weights for c in [*paper.conditions(), paper.random_condition()]}
    assert {item.name for item in fields(ProbeSettings)} >= {*QUICK, *PAPER}


def test_policies_that_compute_the_same_run_once():
    labels = [c.label for c in ProbeSettings(dtypes=("float32", "float16"), offsets=()).conditions()]
    assert labels == ["float32/float32", "float16/float32_scores", "float16/float32", "float16/compute",
                      "float16/low_positions"]  # fmt: skip
    mixed = ProbeSettings(dtypes=("float32",), rotary_dtypes=("bfloat16",), precisions=("compute",)).conditions()
    assert [c.label for c in mixed] == ["float32/bfloat16/compute"]


def test_sequences_are_anchor_then_text(words):
    tokenizer = load_tokenizer("byte")
    found = read_sequences(words, tokenizer, tokens=100, sequences=5, seed=0)
    assert found.shape == (5, 100) and (found[:, 0] == 256).all()
    texts = [json.loads(line)["text"] for line in Path(words).read_text().splitlines()]
    for sequence in found:
        first = tokenizer.decode(sequence[1:]).split("<eos>")[0]
        assert any(text.startswith(first) for text in texts)
    assert (found != read_sequences(words, tokenizer, tokens=100, sequences=5, seed=1)).any()


def test_rows_of_documents_by_hand():
    rows, document = as_rows(np.array([[9, 1, 2, 3, 4, 5, 6, 7]]), 9)
    assert rows.tolist() == [[9, 1, 9, 3, 9, 5, 9, 7]] and document.tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert positions_in_documents(document).tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
