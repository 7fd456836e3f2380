import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.data_view import length_histogram, print_lengths, print_report


def test_lengths_by_powers_of_two():
    assert length_histogram(np.array([1, 5, 6, 17])) == [
        ("1", 1, 1),
        ("2-3", 0, 0),
        ("4-7", 2, 11),
        ("8-15", 0, 0),
        ("16-31", 1, 17),
    ]


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=50))
def test_every_document_is_in_its_range(lengths):
    rows = length_histogram(np.array(lengths))
    assert sum(documents for _, documents, _ in rows) == len(lengths)
    for span, documents, tokens in rows:
        low, _, high = span.replace(",", "").partition("-")
        inside = [n for n in lengths if int(low) <= n <= int(high or low)]
        assert (documents, tokens) == (len(inside), sum(inside))


def test_tables_name_every_number(capsys):
    print_lengths(np.array([3, 3, 900]))
    print_report({"store/tokens": 906, "mix/code/share": 0.25, "training/rows": 7, "validation/rows": 2})
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert ["512-1,023", "1", "900", "#" * 24] in lines
    assert ["tokens", "906"] in lines and ["mix/code/share", "0.2500"] in lines
    assert ["rows", "7", "2"] in lines
