from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.config import DataConfig
from datamodules.document_table import DocumentTable
from datamodules.mixes import mix_documents
from datamodules.splits import plan_parts
from datamodules.tokenizers import load_tokenizer

BYTE = load_tokenizer("byte")
PLAIN = DataConfig(anchor="none", positions="continuous", context_length=16)


def table_of(**lengths):
    """lengths of each source's documents, by its name."""
    source = np.repeat(np.arange(len(lengths)), [len(each) for each in lengths.values()])
    return DocumentTable(np.concatenate([np.array(each) for each in lengths.values()]), source, tuple(lengths))


def tokens_by_source(documents, table):
    counts = np.bincount(table.source[documents], table.lengths[documents], len(table.sources))
    return dict(zip(table.sources, counts.astype(int).tolist(), strict=True))


def test_without_a_mix_every_document_comes_once_in_its_order():
    table = table_of(code=[5, 3], prose=[4])
    mixed = mix_documents(np.array([2, 0, 1]), table, PLAIN)
    assert mixed.documents.tolist() == [2, 0, 1] and mixed.report == {}


def test_weights_are_shares_of_tokens_and_sources_without_one_are_left_out():
    table = table_of(code=[10] * 30, prose=[10] * 30, web=[10] * 30)
    config = replace(PLAIN, mix={"code": 3.0, "prose": 1.0})
    mixed = mix_documents(np.arange(90), table, config)
    assert tokens_by_source(mixed.documents, table) == {"code": 450, "prose": 150, "web": 0}
    times = np.bincount(mixed.documents, minlength=90)
    assert set(times[:30].tolist()) == {1, 2}  # one and a half passes
    assert times[30:60].sum() == 15 and times[30:60].max() == 1
    assert mixed.report == {
        "code/documents": 45,
        "code/tokens": 450,
        "code/share": 0.75,
        "code/passes": 1.5,
        "prose/documents": 15,
        "prose/tokens": 150,
        "prose/share": 0.25,
        "prose/passes": 0.5,
    }


def test_the_mix_has_the_tokens_asked_for():
    table = table_of(code=[10] * 10, prose=[7] * 10)
    config = replace(PLAIN, mix={"code": 1.0, "prose": 1.0}, mix_tokens=1000)
    assert tokens_by_source(mix_documents(np.arange(20), table, config).documents, table) == {"code": 500, "prose": 497}


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
    st.floats(0.1, 10),
    st.integers(1, 3000),
    st.integers(0, 3),
)
def test_each_source_is_within_half_a_document_of_its_share(code, prose, weight, total, seed):
    table = table_of(code=code, prose=prose)
    config = replace(PLAIN, mix={"code": weight, "prose": 1.0}, mix_tokens=total, shuffle_seed=seed)
    documents = mix_documents(np.arange(len(code) + len(prose)), table, config).documents
    held = tokens_by_source(documents, table)
    for name, lengths, share in (("code", code, weight / (weight + 1)), ("prose", prose, 1 / (weight + 1))):
        times = np.bincount(documents, minlength=len(code) + len(prose))[table.source == table.sources.index(name)]
        assert abs(held[name] - share * total) <= max(lengths) / 2 or times.sum() == 1  # one document at least
        assert times.max() - times.min() <= 1


def test_long_documents_are_repeated_and_the_mix_of_sources_stays():
    table = table_of(code=[10] * 40 + [100] * 4, prose=[10] * 60 + [100] * 2, notes=[10] * 20)
    before = {"code": 800, "prose": 800, "notes": 200}
    mixed = mix_documents(np.arange(126), table, replace(PLAIN, upsample_longer_than=50))
    held = tokens_by_source(mixed.documents, table)
    assert all(abs(held[name] - tokens) <= 50 for name, tokens in before.items())
    long = table.lengths[mixed.documents] > 50
    short_tokens = tokens_by_source(mixed.documents[~long], table)
    # A tenth of what short documents held; a source without long ones stays as it is.
    assert short_tokens == {"code": 40, "prose": 60, "notes": 200}
    again = mix_documents(np.arange(126), table, replace(PLAIN, upsample_longer_than=50))
    assert (mixed.documents == again.documents).all()


def test_only_training_documents_are_mixed_and_the_rows_say_so():
    table = table_of(code=[8] * 50, prose=[8] * 50)
    training, validation = plan_parts(table, replace(PLAIN, mix={"prose": 2.0}, mix_tokens=1600, tail="pad"), BYTE)
    plain, same = plan_parts(table, replace(PLAIN, tail="pad"), BYTE)
    assert validation.documents.tolist() == same.documents.tolist()
    assert set(training.documents) <= set(plain.documents) and set(table.source[training.documents]) == {1}
    assert training.mix["prose/tokens"] == training.plan.report.tokens_in == 1600


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"kode": 1.0}, r"data\.mix\.kode=1\.0 names no source.*code, prose.*source_field"),
        ({"prose": 1.0}, r"data\.mix\.prose=1\.0: all documents of that source validate.*validation_fraction"),
    ],
)
def test_weights_that_choose_nothing(mix, message):
    with pytest.raises(ValueError, match=message):
        mix_documents(np.array([0, 1]), table_of(code=[5, 3], prose=[4]), replace(PLAIN, mix=mix))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mix": {"a": -1.0}}, r"data\.mix\.a=-1\.0 is no weight"),
        ({"mix": {"a": float("nan")}}, r"data\.mix\.a=nan is no weight"),
        ({"mix": {"a": float("inf")}}, r"data\.mix\.a=inf is no weight"),
        ({"mix": {"a": 0.0}}, r"weighs every source 0"),
        ({"mix_tokens": 5}, r"data\.mix_tokens=5 says nothing without data\.mix"),
        ({"mix": {"a": 1.0}, "mix_tokens": 0}, r"data\.mix_tokens=0 leaves nothing"),
        ({"upsample_longer_than": 0}, r"data\.upsample_longer_than=0"),
        ({"keep_shorter": 1.5}, r"data\.keep_shorter=1\.5"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)
