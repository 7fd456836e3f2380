"""The rule, its drawing, its count of visible pairs, and the data choices that go with it."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modules.attention.strategies import STRATEGIES, Strategy, check_data_choice, visible_pairs, visible_rule
from tests.oracles.dense_attention import dense_mask

WINDOWED = [
    Strategy(
        name="windowed",
        scope=scope,
        anchor=anchor,
        window=window,
        sink=sink,
        default_positions="continuous",
        default_anchor="every_document",
    )
    for scope, anchor in (("row", False), ("document", False), ("document", True))
    for window, sink in ((1, 0), (3, 0), (2, 1), (4, 3))
]

SMALL_WINDOWS = [replace(STRATEGIES["sliding_window"], window=3), replace(STRATEGIES["sink_window"], window=2, sink=2)]
"""The registered ones, so small that a row of a test is longer."""


def mask_of(strategy: Strategy, document: list[int]) -> np.ndarray:
    index = torch.arange(len(document))
    rule = visible_rule(strategy, torch.tensor([document]))
    return rule(torch.tensor(0), torch.tensor(0), index[:, None], index).numpy()


@pytest.mark.parametrize(
    ("strategy", "document", "pairs"),
    [
        ("full", [0, 1, 1, 1, 2, 2, 2, 2], 36),
        ("anchor", [0, 1, 1, 1, 2, 2, 2, 2], 24),
        ("full", [1, 1, 1, 2, 2, 2, 2], 28),
        ("intra_document", [1, 1, 1, 2, 2, 2, 2], 16),
        ("intra_document_reset", [1, 1, 1, 2, 2, 2, 2], 16),
    ],
)
def test_worked_example(strategy, document, pairs):
    has_anchor = document[0] == 0
    count = visible_pairs(STRATEGIES[strategy], np.array([3, 4]), np.array([0, 0]), int(has_anchor), 1)
    assert count.tolist() == [pairs]
    assert mask_of(STRATEGIES[strategy], document).sum() == pairs


def test_drawing_of_the_anchor_rule():
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert mask_of(STRATEGIES["anchor"], [0, 1, 1, 2, 2, -1]).astype(int).tolist() == expected


def test_drawing_of_a_window_with_a_sink():
    strategy = Strategy(
        name="w", scope="document", window=2, sink=1, default_positions="continuous", default_anchor="none"
    )
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    assert mask_of(strategy, [1, 1, 1, 1, 2, 2]).astype(int).tolist() == expected


def test_drawing_of_the_registered_windows():
    document = [0, 1, 1, 1, 1, 2, 2, -1]
    sliding, sink = (mask_of(strategy, document).astype(int).tolist() for strategy in SMALL_WINDOWS)
    assert sliding == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert sink == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_a_window_may_hold_more_than_the_row():
    strategy = replace(STRATEGIES["sliding_window"], window=100)
    document = [1, 1, 1, 2, 2, -1]
    np.testing.assert_array_equal(mask_of(strategy, document), mask_of(STRATEGIES["intra_document"], document))


rows_of_lengths = st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=4)


@given(rows=rows_of_lengths, anchor=st.booleans(), padding=st.integers(0, 3))
def test_visible_pairs_equal_counting(rows, anchor, padding):
    lengths = np.array([length for row in rows for length in row], dtype=np.int64)
    row_of = np.array([index for index, row in enumerate(rows) for _ in row], dtype=np.int64)
    for strategy in (*STRATEGIES.values(), *SMALL_WINDOWS, *WINDOWED):
        counted = []
        for row in rows:
            document = [0] * anchor + [n for n, length in enumerate(row, 1) for _ in range(length)] + [-1] * padding
            counted.append(int(mask_of(strategy, document).sum()) if document else 0)
            if strategy.name in STRATEGIES and document:
                oracle = dense_mask(strategy.name, document, window=strategy.window or 0, sink=strategy.sink)
                assert oracle.sum() == counted[-1]
        assert visible_pairs(strategy, lengths, row_of, int(anchor), len(rows)).tolist() == counted


@pytest.mark.parametrize(
    ("strategy", "anchor", "positions", "resolved"),
    [
        ("full", "auto", "auto", ("every_document", "continuous")),
        ("full", "row_start", "reset", ("row_start", "reset")),
        ("full", "none", "auto", ("none", "continuous")),
        ("intra_document", "auto", "auto", ("every_document", "continuous")),
        ("intra_document", "none", "continuous", ("none", "continuous")),
        ("intra_document_reset", "auto", "auto", ("every_document", "reset")),
        ("intra_document_reset", "none", "reset", ("none", "reset")),
        ("anchor", "auto", "auto", ("row_start", "continuous")),
        ("anchor", "auto", "reset", ("row_start", "reset")),
        ("anchor", "every_document", "auto", ("every_document", "continuous")),
        ("sliding_window", "auto", "auto", ("every_document", "continuous")),
        ("sliding_window", "none", "reset", ("none", "reset")),
        ("sink_window", "auto", "auto", ("row_start", "continuous")),
        ("sink_window", "every_document", "auto", ("every_document", "continuous")),
        ("sink_window", "none", "auto", ("none", "continuous")),
    ],
)
def test_auto_becomes_the_strategys_default(strategy, anchor, positions, resolved):
    assert check_data_choice(STRATEGIES[strategy], anchor, positions) == resolved


@pytest.mark.parametrize(
    ("strategy", "anchor", "positions", "key", "is_really"),
    [
        ("anchor", "none", "auto", "data.anchor='none'", "attention.strategy='intra_document'"),
        ("anchor", "none", "reset", "data.anchor='none'", "attention.strategy='intra_document_reset'"),
        ("intra_document", "auto", "reset", "data.positions='reset'", "attention.strategy='intra_document_reset'"),
        (
            "intra_document_reset",
            "auto",
            "continuous",
            "data.positions='continuous'",
            "attention.strategy='intra_document'",
        ),
        ("intra_document", "row_start", "auto", "data.anchor='row_start'", "attention.strategy='anchor'"),
        ("intra_document_reset", "row_start", "auto", "data.anchor='row_start'", "attention.strategy='anchor'"),
        ("sliding_window", "row_start", "auto", "data.anchor='row_start'", "'sink_window' with attention.sink=0"),
    ],
)
def test_a_strategy_in_disguise_is_refused_by_its_name(strategy, anchor, positions, key, is_really):
    with pytest.raises(ValueError) as error:
        check_data_choice(STRATEGIES[strategy], anchor, positions)
    assert key in str(error.value)
    assert is_really in str(error.value)
    assert f"attention.strategy={strategy!r}" in str(error.value)


@pytest.mark.parametrize("anchor", ["none", "every_document"])
def test_an_anchor_that_no_sink_keeps_in_sight_is_refused(anchor):
    strategy = replace(STRATEGIES["sink_window"], sink=0)
    assert check_data_choice(strategy, "auto", "auto") == ("row_start", "continuous")
    with pytest.raises(ValueError, match=r"that is attention.strategy='sliding_window'"):
        check_data_choice(strategy, anchor, "auto")


@pytest.mark.parametrize(("anchor", "positions"), [("rowstart", "auto"), ("auto", "restart")])
def test_unknown_data_choices_are_refused(anchor, positions):
    with pytest.raises(ValueError, match="is none of 'auto'"):
        check_data_choice(STRATEGIES["full"], anchor, positions)


@pytest.mark.parametrize("change", [{"anchor": True}, {"window": 0}, {"sink": 2}, {"window": 4, "sink": -1}])
def test_contradicting_fields_are_refused(change):
    with pytest.raises(ValueError, match="strategy 'full'"):
        replace(STRATEGIES["full"], **change)


def test_counting_and_checking_need_no_torch():
    code = "import sys, modules.attention.config, modules.attention.strategies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
