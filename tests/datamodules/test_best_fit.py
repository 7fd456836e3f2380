import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.best_fit import best_fit_decreasing


def test_the_drawn_example():
    assert best_fit_decreasing(np.array([3, 5, 2, 2]), 6).tolist() == [1, 0, 1, 2]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.integers(30, 700))
def test_best_fit_decreasing_is_the_textbook_one(widths, room):
    """Oracle: one piece after another, looking at every open row. Rows of equal rest are interchangeable, so the
    rests of all rows have to agree."""
    rests = []
    for width in sorted(widths, reverse=True):
        fitting = [i for i, rest in enumerate(rests) if rest >= width]
        if fitting:
            rests[min(fitting, key=rests.__getitem__)] -= width
        else:
            rests.append(room - width)
    filled = np.bincount(best_fit_decreasing(np.array(widths), room), widths)
    assert sorted((room - filled).astype(int).tolist()) == sorted(rests)
