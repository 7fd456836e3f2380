import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.config import DataConfig
from datamodules.document_table import DocumentTable
from datamodules.splits import plan_parts, split_documents
from datamodules.tokenizers import load_tokenizer


def split(lengths, fraction=0.3, tokens=100, seed=0):
    return split_documents(np.array(lengths), validation_fraction=fraction, validation_tokens=tokens, shuffle_seed=seed)


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 40), min_size=2, max_size=60), st.floats(0.01, 0.5), st.integers(40, 300), st.integers(0, 9)
)
def test_every_document_is_in_one_part(lengths, fraction, tokens, seed):
    training, validation = split(lengths, fraction, tokens, seed)
    assert sorted([*training, *validation]) == list(range(len(lengths)))
    assert 1 <= len(validation) <= max(1, round(fraction * len(lengths)))
    assert sum(lengths[i] for i in validation) <= tokens
    again = split(lengths, fraction, tokens, seed)
    assert again[0].tolist() == training.tolist() and again[1].tolist() == validation.tolist()


def test_a_document_over_the_cap_stays_in_training():
    lengths = [10] * 50
    plenty = split(lengths, 0.2, 10_000)[1]
    lengths[plenty[0]] = 1000
    training, validation = split(lengths, 0.2, 60)
    assert validation.tolist() == plenty[1:7].tolist()  # the first is too long, six of ten tokens fit
    assert set(training) == set(range(50)) - set(validation)


def test_both_parts_are_shuffled_by_the_seed():
    training, _ = split([5] * 100, seed=1)
    assert training.tolist() != sorted(training)
    assert training.tolist() != split([5] * 100, seed=2)[0].tolist()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([200, 300, 400], r"data\.validation_tokens=100 leave no document to validate on.*shortest of them with \d00"),
        ([1, 1, 1], "leave no document to validate on"),
        ([50], "holds one document"),
    ],
)
def test_an_empty_part_is_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        split(lengths)


def plan(lengths, config):
    return plan_parts(DocumentTable(lengths, np.zeros_like(lengths), ("own",)), config, load_tokenizer("byte"))


def test_nothing_but_the_store_and_its_settings_decides_who_validates():
    lengths = np.random.default_rng(0).integers(2, 500, 300)
    chosen = {
        tuple(plan(lengths, DataConfig(context_length=length, anchor=anchor, packing=packing))[1].documents)
        for length in (64, 256)
        for anchor in ("row_start", "every_document", "none")
        for packing in ("concatenate", "best_fit")
    }
    assert len(chosen) == 1


def test_validation_loses_nothing_whatever_training_drops():
    lengths = np.random.default_rng(0).integers(2, 500, 300)
    config = DataConfig(context_length=64, anchor="row_start", long_documents="drop", tail="drop")
    training, validation = plan(lengths, config)
    assert training.plan.report.documents_dropped > 0
    assert validation.plan.report.tokens_out == lengths[validation.documents].sum()
