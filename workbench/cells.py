"""The cells that a sweep's axes stand for, each with its name.

grid: {data.context_length: [512, 2048], attention.strategy: [full, anchor]}   4 points
seeds: [0, 1]                                                                   8 cells
include: [{data.context_length: 8192, attention.strategy: anchor}]             10 cells
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.conditions import matches

Axis = dict[str, list[Any]]
"""Keys that move together (one, or several of a zip) and their equally long lists of values."""
Exclusion = tuple[dict[str, Any], str]
"""(when, why)"""
Rule = tuple[dict[str, Any], dict[str, Any]]
"""(when, what to set then)"""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One grid point with one seed."""

    name: str
    """Readable: context_length=512 precision=32-true strategy=anchor."""
    axes: dict[str, Any]
    """The grid point: {'data.context_length': 512, ...}."""
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    """What rules set for this cell besides its axes, dotted."""
    excluded_why: str | None = None

    @property
    def label(self) -> str:
        """The values alone, for narrow columns: 512 32-true anchor."""
        values = [_text(value) for value in self.axes.values()]
        return " ".join(values + ([self.name.rpartition(" ")[2]] if self.name.endswith(f"seed={self.seed}") else []))


def expand(
    axes: Sequence[Axis],
    *,
    seeds: Sequence[int],
    include: Sequence[dict[str, Any]] = (),
    exclude: Sequence[Exclusion] = (),
    rules: Sequence[Rule] = (),
) -> Iterator[Cell]:
    """Every combination of the axes with every seed, the first axis slowest; then the included points.

    An excluded point is a cell that says why. Points of `include` were asked for one by one: `exclude` leaves them.
    """
    points = [(point, _excluded(point, exclude)) for point in _product(axes)] + [
        (dict(point), None) for point in include
    ]
    short = _short_names(list(dict.fromkeys(key for point, _ in points for key in point)))
    for point, why in points:
        for seed in seeds:
            name = " ".join(f"{short[key]}={_text(value)}" for key, value in point.items())
            if len(seeds) > 1 or not name:
                name = f"{name} seed={seed}".strip()
            settings: dict[str, Any] = {}
            for when, then in rules:
                if matches(when, {**point, "seed": seed}):
                    settings.update(then)
            yield Cell(name=name, axes=point, seed=seed, settings=settings, excluded_why=why)


def _product(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    per_axis = [[dict(zip(axis, values, strict=True)) for values in zip(*axis.values(), strict=True)] for axis in axes]
    for point in itertools.product(*per_axis):
        yield {key: value for part in point for key, value in part.items()}


def _excluded(point: Mapping[str, Any], exclude: Sequence[Exclusion]) -> str | None:
    return next((why for when, why in exclude if matches(when, point)), None)


def _short_names(keys: list[str]) -> dict[str, str]:
    """The last part of each key where that is enough to tell them apart."""
    count = Counter(key.rpartition(".")[2] for key in keys)
    return {key: key if count[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in keys}


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
