import json

import numpy as np
import pytest

from datamodules.config import DataConfig
from datamodules.corpus import Corpus
from datamodules.tokenizers import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer("byte")


@pytest.fixture
def store_of(tmp_path, tokenizer):
    """Makes a corpus of given texts; an end of document is added to each."""

    def make(texts):
        file = tmp_path / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return Corpus.open_or_build(tmp_path / "home", DataConfig(corpus=str(file)), tokenizer)

    return make


@pytest.fixture
def many_texts():
    """200 texts of 1 to 30 letters."""
    random = np.random.default_rng(0)
    return ["".join(random.choice(list("abcdefgh"), random.integers(1, 31))) for _ in range(200)]
