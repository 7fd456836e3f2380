"""What planning knows of the documents."""

from typing import NamedTuple

import numpy as np


class DocumentTable(NamedTuple):
    """All documents of a run, without their tokens."""

    lengths: np.ndarray
    """int64 [documents], tokens of each, its end token included; >= 1."""
    source: np.ndarray
    """int64 [documents], index into `sources`."""
    sources: tuple[str, ...]
    """Names of the sources."""
