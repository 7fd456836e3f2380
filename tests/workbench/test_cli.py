"""The commands as a user types them: one clear message and exit code 2 for each wrong input, nothing written."""

import json
import subprocess
import sys
import textwrap

import pytest
import yaml

from workbench.cli import main


@pytest.fixture
def experiment(tmp_path, tiny):
    """Writes the tiny experiment with changes, returns its path."""

    def write(name="tiny", **sections):
        tree = {key: {**tiny.get(key, {}), **sections.get(key, {})} for key in {*tiny, *sections}}
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(tree))
        return file

    return write


def refused(capsys, home, *words) -> str:
    """Runs a command that must be refused; its message."""
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert "Traceback" not in err and out == ""
    left = [str(path) for path in home.rglob("*") if path.is_file()] if home.exists() else []
    assert left == [], left
    return err


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["attention.stratgy=full"], ["attention.stratgy", "attention.strategy"]),
        (["data.context_length=128K"], ["data.context_length='128K'", "131072"]),
        (["data.context_length=1"], ["data.context_length=1"]),
        (["trainer.max_steps=ten"], ["trainer.max_steps='ten'", "whole number"]),
        (["attention.kernel=flash9"], ["attention.kernel", "flash9"]),
        (["attention.kernel=reference", "data.context_length=9000"], ["attention.kernel='reference'", "8192"]),
        (["trainer.precision=16-mixed"], ["trainer.precision='16-mixed'", "GPU"]),
        (["trainer.precision=16-true"], ["trainer.precision='16-true'", "GPU"]),
        (["trainer.precision=transformer-engine"], ["trainer.precision='transformer-engine'", "pickle", "bf16-mixed"]),
        (["trainer.precision=transformer-engine-float16"], ["trainer.precision='transformer-engine-float16'"]),
        (
            ["trainer.compile=true", "trainer.precision=bf16-true", "trainer.bfloat16_products=float32"],
            ["trainer.bfloat16_products='float32' and trainer.compile=true contradict"],
        ),
        (["trainer.accelerator=cuda"], ["trainer.accelerator='cuda'"]),
        (["data.corpus=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["data.corpus=pyhton_stdlib"], ["data.corpus", "python_stdlib"]),
        (["data.tokenizer=nowhere"], ["data.tokenizer", "nowhere"]),
        (["attention.strategy=anchor", "data.anchor=none"], ["data.anchor='none'", "intra_document"]),
        (["attention.strategy=intra_document", "data.positions=reset"], ["intra_document_reset"]),
        (["attention.strategy=intra_document_reset", "data.positions=continuous"], ["intra_document"]),
        (["attention.strategy=intra_document", "data.anchor=row_start"], ["row_start"]),
        (["data.long_documents=drop", "data.context_length=4"], ["data.long_documents='drop'", "data.context_length"]),
        (["data.context_length=100000"], ["data.context_length", "data.tail"]),
        (["model.max_positions=32"], ["model.max_positions=32", "data.context_length=64"]),
        (["model.preset=lama"], ["model.preset='lama'"]),
        (["rotary.scaling=yarn"], ["rotary.scaling"]),
        (["rotary.scaling.rope_type=yarn", "rotary.theta=-1"], ["rotary.scaling.factor=None", "rotary.theta=-1.0"]),
        (
            ["rotary.scaling.rope_type=default", "rotary.scaling.partial_rotary_factor=0.4"],
            ["rotary.scaling.partial_rotary_factor=0.4", "3 of 8"],
        ),
        (["optimizer.master_weights=float32"], ["optimizer.master_weights='float32'", "trainer.precision='32-true'"]),
        (["trainer.devices=2"], ["trainer.devices=2"]),
        (["seed=-1"], ["seed=-1"]),
        (["data.context_length=2"], ["data.context_length=2"]),
        (["optimizer.warmup_steps=9"], ["optimizer.warmup_steps=9", "trainer.max_steps=6"]),
        (["data.corpus=${oc.env:HOME}"], ["data.corpus", "refers to no setting", "oc.env"]),
        (["tracking.experiment="], ["tracking.experiment is empty"]),
        (["novalue"], ["novalue", "key=value"]),
    ],
)
def test_wrong_settings(capsys, home, experiment, settings, parts):
    message = refused(capsys, home, "fit", experiment(), *settings)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b'{"text": "good"}\nnot json\n', [":2", "JSON"]),
        (b'{"text": "good"}\n{"txt": "x"}\n', [":2", "text"]),
        (b'{"text": "good"}\n{"text": 5}\n', [":2"]),
        (b'{"text": "good"}\n[1]\n', [":2"]),
        (b'{"text": "good"}\n{"text": "\xff"}\n', ["byte 27"]),
        (b"", ["holds no text"]),
        (b'{"text": ""}\n{"text": ""}\n', ["no text"]),
        (b'{"text": "only one document here"}\n', ["document"]),
    ],
)
def test_wrong_corpora(capsys, home, experiment, tmp_path, content, parts):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    message = refused(capsys, home, "fit", experiment(data={"corpus": str(file)}))
    for part in ("bad.jsonl" if b"only" not in content else "data.", *parts):
        assert part in message, message


def test_a_tokenizer_that_is_none(capsys, home, experiment, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text('{"version": "1.0"}')
    message = refused(capsys, home, "fit", experiment(data={"tokenizer": str(file)}))
    assert "data.tokenizer" in message and "tokenizer.json" in message


def test_sweeps_are_checked_whole_before_anything_starts(capsys, home, experiment, tmp_path):
    """Mistakes of several cells and of the file come in one message."""
    experiment()
    file = tmp_path / "grid.yaml"
    file.write_text(
        textwrap.dedent("""
        base: tiny.yaml
        grid:
          data.context_length: [64, 100000]
          attention.kernel: [auto, flash9]
        """)
    )
    message = refused(capsys, home, "sweep", file)
    assert "flash9" in message
    file.write_text("base: tiny.yaml\ngrid: {data.contextlength: [64]}\n")
    assert "data.context_length" in refused(capsys, home, "sweep", file)
    file.write_text("base: tiny.yaml\ngrid: {}\n")
    assert "grid is empty" in refused(capsys, home, "sweep", file)
    file.write_text("base: tiny.yaml\ngrid: {data.context_length: [64, 100000]}\n")
    assert "data.tail" in refused(capsys, home, "sweep", file)
    file.write_text("base: tiny.yaml\ngrid: {attention.strategy: [full, anchor]}\n")
    assert "axis" in refused(capsys, home, "sweep", file, "attention.strategy=full")
    assert "cannot be read" in refused(capsys, home, "sweep", tmp_path / "none.yaml")


def test_dry_run_writes_nothing_and_prints_one_document(capsys, home, experiment, tmp_path):
    experiment()
    file = tmp_path / "grid.yaml"
    file.write_text(
        "base: tiny.yaml\ngrid: {attention.strategy: [full, anchor], data.context_length: [32, 64]}\n"
        "exclude: [{when: {attention.strategy: full, data.context_length: 64}, why: too slow}]\n"
    )
    assert main(["sweep", str(file), "--dry-run", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {frozenset(cell) for cell in cells} == {
        frozenset({
            "name", "seed", "state", "why", "hash", "overrides", "parameter_count", "tokens_per_step",
            "visible_pair_share", "flops", "memory_bytes", "seconds", "guess",
        })
    }  # fmt: skip
    assert sorted(cell["state"] for cell in cells) == ["excluded", "new", "new", "new"]
    assert {cell["why"] for cell in cells if cell["state"] == "excluded"} == {"too slow"}
    assert {cell["visible_pair_share"] for cell in cells} == {None}
    assert not home.exists()
    assert main(["sweep", str(file), "--dry-run"]) == 0
    assert "not tokenised yet" in capsys.readouterr().out
    assert main(["prepare", str(tmp_path / "tiny.yaml")]) == 0
    capsys.readouterr()
    assert main(["sweep", str(file), "--dry-run", "--json"]) == 0
    shares = {cell["name"]: cell["visible_pair_share"] for cell in json.loads(capsys.readouterr().out)["cells"]}
    assert shares["strategy=full context_length=32"] == 1.0
    assert 0 < shares["strategy=anchor context_length=64"] < 1


def test_report_and_resume_without_runs(capsys, home, experiment):
    assert "no run" in refused(capsys, home, "report", "quickstart")
    assert "no run" in refused(capsys, home, "fit", experiment(), "--resume")


def test_help_and_unknown_commands():
    for words, code in ((["--help"], 0), (["frobnicate"], 2), ([], 2), (["fit"], 2)):
        done = subprocess.run([sys.executable, "-m", "workbench.cli", *words], capture_output=True, text=True)
        assert done.returncode == code
        assert "Traceback" not in done.stderr


def test_a_home_that_cannot_be_written(capsys, tmp_path, monkeypatch, experiment):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "file" / "home"))
    assert main(["fit", str(experiment())]) == 2
    assert "WORKBENCH_HOME" in capsys.readouterr().err


def test_show_lists_every_setting(capsys, home, experiment):
    assert main(["show", str(experiment()), "attention.strategy=anchor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attention"]["strategy"] == "anchor"
    assert main(["show", str(experiment())]) == 0
    assert "data.long_documents" in capsys.readouterr().out
    assert not home.exists()


def test_looking_writes_nothing(capsys, home, experiment, tmp_path):
    """A report or dry run on an experiment that does not exist does not make one."""
    from workbench.tracking import Tracker

    tracker = Tracker(home, "workbench")
    experiment()
    file = tmp_path / "grid.yaml"
    file.write_text("base: tiny.yaml\ngrid: {attention.strategy: [full]}\n")
    assert main(["sweep", str(file), "--dry-run", "tracking.experiment=other"]) == 0
    assert main(["report", "grid", "--experiment", "another"]) == 2
    assert {e.name for e in tracker.client.search_experiments()} == {"Default", "workbench"}
