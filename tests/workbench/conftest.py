"""A small corpus, a home folder and a tiny config that trains in a second."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """$WORKBENCH_HOME, not made yet."""
    folder = tmp_path / "home"
    monkeypatch.setenv("WORKBENCH_HOME", str(folder))
    return folder


@pytest.fixture
def corpus(tmp_path):
    """60 documents of 5 to 80 words with some order to learn."""
    rng = random.Random(0)
    words = ["attention", "anchor", "rotary", "position", "window", "token", "row", "document"]
    file = tmp_path / "corpus.jsonl"
    with file.open("w") as out:
        for _ in range(60):
            text = " ".join(rng.choice(words) for _ in range(rng.randint(5, 80)))
            out.write(json.dumps({"text": text}) + "\n")
    return file


@pytest.fixture
def tiny(corpus):
    """Settings of a run that takes a second: nested, as a YAML would hold them."""
    return {
        "model": {"overrides": {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden_width": 64}},
        "data": {"corpus": str(corpus), "context_length": 64, "validation_tokens": 1000, "validation_fraction": 0.2},
        "optimizer": {"learning_rate": 3e-3},
        "trainer": {"max_steps": 6, "rows_per_batch": 2, "accumulate": 2},
    }


@pytest.fixture
def start():
    """Starts a command line in the background. What a failed test leaves running would slow down all others."""
    started = []

    def start(*words, home):
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.cli", *words],
            cwd=ROOT, env={**os.environ, "WORKBENCH_HOME": str(home)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()  # its trials notice within a second
            process.wait()
