"""A sweep file: what it may hold, and the cells it stands for.

    base: base/quickstart.yaml        one YAML or a list, relative to the sweep file
    set: {trainer.max_steps: 300}     fixed overrides
    grid:                             axes, every combination
      data.context_length: [512, 2048]
      attention.strategy: [full, anchor]
    zip:                              keys that move together: one axis
      - {optimizer.learning_rate: [1e-3, 3e-4], optimizer.warmup_steps: [10, 30]}
    seeds: [0, 1]
    exclude:
      - {when: {data.context_length: ">=2048", attention.strategy: full}, why: too slow here}
    hold: {tokens_per_step: 8192}     trainer.accumulate follows

`when` compares; it never evaluates code.
"""

import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.config import check_key, flatten, read_yaml, schema, suggestion
from workbench.errors import UserError

KEYS = ("name", "base", "set", "grid", "zip", "seeds", "exclude", "hold")

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One grid point with one seed."""

    name: str
    """Readable: context_length=512 precision=32-true strategy=anchor."""
    axes: dict[str, Any]
    """The grid point: {'data.context_length': 512, ...}."""
    seed: int
    excluded_why: str | None

    @property
    def label(self) -> str:
        """The values alone, for narrow columns: 512 32-true anchor."""
        values = [_text(value) for value in self.axes.values()]
        return " ".join(values + ([self.name.rpartition(" ")[2]] if self.name.endswith(f"seed={self.seed}") else []))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep file, read and checked against the config's keys."""

    name: str
    path: Path
    base: tuple[tuple[str, dict[str, Any]], ...]
    """Layers below the cells: (file, contents), then ('<file> set', overrides)."""
    axes: tuple[dict[str, list[Any]], ...]
    """Each axis maps its keys (several for a zip) to equally long lists."""
    seeds: tuple[int, ...]
    exclude: tuple[tuple[dict[str, Any], str], ...]
    tokens_per_step: int | None

    @property
    def axis_keys(self) -> list[str]:
        """Keys of all axes, in the file's order."""
        return [key for axis in self.axes for key in axis]

    def cells(self) -> Iterator[Cell]:
        """Every combination of the axes with every seed, the first axis slowest."""
        labels = _short_names(self.axis_keys)
        per_axis = [
            [dict(zip(axis, values, strict=True)) for values in zip(*axis.values(), strict=True)] for axis in self.axes
        ]
        for point in itertools.product(*per_axis):
            axes = {key: value for part in point for key, value in part.items()}
            why = next((why for when, why in self.exclude if _matches(when, axes)), None)
            for seed in self.seeds:
                name = " ".join(f"{labels[key]}={_text(value)}" for key, value in axes.items())
                if len(self.seeds) > 1 or not name:
                    name = f"{name} seed={seed}".strip()
                yield Cell(name=name, axes=axes, seed=seed, excluded_why=why)


def read_sweep(path: Path) -> Sweep:
    """Reads and checks a sweep file.

    Raises:
        UserError: every mistake in the file at once, each with its key, value and the way out.
    """
    contents = read_yaml(path)
    unknown = [key for key in contents if key not in KEYS]
    problems = [f"{key} is no key of a sweep file.{suggestion(key, KEYS)}" for key in unknown]
    if any(key in {name.partition(".")[0] for name in schema()} for key in unknown):
        problems = [
            "is the YAML of one experiment, not a sweep file. Use `workbench fit`, or name it as base: of a sweep."
        ]
    axes = _axes(contents, problems)
    base = _base(contents, path, problems)
    own_seed = next((layer["seed"] for _, layer in reversed(base) if "seed" in layer), 0)
    seeds = _seeds(contents.get("seeds", [own_seed]), problems)
    if not axes and "seeds" not in contents and not problems:
        problems.append(
            "the grid is empty. Give grid at least one axis, for example attention.strategy: [full, anchor]."
        )
    sweep = Sweep(
        name=_name(contents.get("name", path.stem), problems),
        path=path,
        base=base,
        axes=axes,
        seeds=seeds,
        exclude=_exclude(contents.get("exclude") or [], [key for axis in axes for key in axis], problems),
        tokens_per_step=_hold(contents.get("hold") or {}, problems),
    )
    if sweep.tokens_per_step is not None and "trainer.accumulate" in {*sweep.axis_keys, *flatten(sweep.base[-1][1])}:
        problems.append("hold.tokens_per_step sets trainer.accumulate, so set and grid cannot. Remove one of them.")
    problems.extend(
        f"{key} is both in set and an axis. Remove it from set."
        for key in flatten(sweep.base[-1][1])
        if key in sweep.axis_keys
    )
    if not problems:
        doubled = [name for name, count in Counter(cell.name for cell in sweep.cells()).items() if count > 1]
        problems.extend(f"the cell {name!r} stands twice in the grid. Remove the repeated value." for name in doubled)
        if all(cell.excluded_why for cell in sweep.cells()):
            problems.append("exclude leaves no cell. Narrow its when.")
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return sweep


def _name(value: Any, problems: list[str]) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[\w][\w .-]*", value):
        problems.append(f"name={value!r} must be letters, digits, spaces, '.', '_' or '-'.")
    return str(value)


def _base(contents: Mapping[str, Any], path: Path, problems: list[str]) -> tuple[tuple[str, dict[str, Any]], ...]:
    listed = contents.get("base") or []
    layers: list[tuple[str, dict[str, Any]]] = []
    for item in [listed] if isinstance(listed, str) else listed if isinstance(listed, list) else [listed]:
        if not isinstance(item, str):
            problems.append(f"base={item!r} must be the path of a YAML file, or a list of them.")
            continue
        file = path.parent / item
        if file.resolve() == path.resolve():
            problems.append(f"base={item!r} is this sweep file itself. Name the YAML of one experiment.")
            continue
        try:
            layers.append((str(file), read_yaml(file)))
        except UserError as error:
            problems.append(f"base: {error}")
    fixed = contents.get("set") or {}
    if not isinstance(fixed, Mapping):
        problems.append(f"set={fixed!r} must hold key: value pairs.")
        fixed = {}
    return (*layers, (f"{path}: set", dict(fixed)))


def _axes(contents: Mapping[str, Any], problems: list[str]) -> tuple[dict[str, list[Any]], ...]:
    grid = contents.get("grid") or {}
    if not isinstance(grid, Mapping):
        problems.append(f"grid={grid!r} must hold key: [values] pairs.")
        grid = {}
    zipped = contents.get("zip") or []
    if isinstance(zipped, Mapping):
        zipped = [zipped]
    if not isinstance(zipped, list) or not all(isinstance(item, Mapping) for item in zipped):
        problems.append(f"zip={zipped!r} must be a list of {{key: [values], key: [values]}}.")
        zipped = []
    if "grid" in contents and not grid and not zipped and not problems:
        problems.append("grid is empty. Give it at least one axis, for example attention.strategy: [full, anchor].")
    flat = flatten(dict(grid))
    axes = [{key: values} for key, values in flat.items()] + [flatten(dict(item)) for item in zipped]
    kinds = schema()
    for axis in axes:
        for key, values in axis.items():
            if key == "seed":
                problems.append("seed is no axis of the grid. Write seeds: [0, 1].")
            elif problem := check_key(key, kinds):
                problems.append(f"grid axis {problem}")
            elif not isinstance(values, list):
                problems.append(f"grid axis {key}={values!r} must be a list of values.")
            elif not values:
                problems.append(f"grid axis {key} is empty. Give it at least one value, or remove it.")
        lengths = {key: len(values) for key, values in axis.items() if isinstance(values, list)}
        if len(set(lengths.values())) > 1:
            problems.append(f"zip moves its keys together, so they need equally many values, not {lengths}.")
    for key, count in Counter(key for axis in axes for key in axis).items():
        if count > 1:
            problems.append(f"{key} is an axis twice. Keep it in grid or in one zip.")
    return tuple(axes) if not problems else ()


def _seeds(value: Any, problems: list[str]) -> tuple[int, ...]:
    is_good = isinstance(value, list) and value and all(type(seed) is int and seed >= 0 for seed in value)
    if not is_good or len(set(value)) < len(value):
        problems.append(f"seeds={value!r} must be a list of different whole numbers, for example [0, 1, 2].")
        return (0,)
    return tuple(value)


def _hold(value: Any, problems: list[str]) -> int | None:
    if not isinstance(value, Mapping) or set(value) - {"tokens_per_step"}:
        problems.append(f"hold={value!r} knows tokens_per_step alone.")
        return None
    tokens = value.get("tokens_per_step")
    if tokens is not None and (type(tokens) is not int or tokens < 2):
        problems.append(f"hold.tokens_per_step={tokens!r} must be a whole number of tokens.")
        return None
    return tokens


def _exclude(value: Any, axes: list[str], problems: list[str]) -> tuple[tuple[dict[str, Any], str], ...]:
    rules: list[tuple[dict[str, Any], str]] = []
    for item in value if isinstance(value, list) else [value]:
        if (
            not isinstance(item, Mapping)
            or set(item) != {"when", "why"}
            or not isinstance(item["when"], Mapping)
            or not item["when"]
        ):
            problems.append(f"exclude holds {item!r}. Write {{when: {{axis: value}}, why: reason}}.")
            continue
        when = flatten(dict(item["when"]))
        for key in when:
            if key not in axes:
                problems.append(f"exclude.when: {key} is no axis of this sweep.{suggestion(key, axes)}")
        rules.append((when, str(item["why"])))
    return tuple(rules)


def _matches(when: Mapping[str, Any], axes: Mapping[str, Any]) -> bool:
    return all(_compares(axes[key], condition) for key, condition in when.items())


def _compares(value: Any, condition: Any) -> bool:
    """Equality, any of a list, or one comparison written as text: '>=8192'."""
    if isinstance(condition, list):
        return any(_compares(value, item) for item in condition)
    if isinstance(condition, str):
        match = re.fullmatch(r"(>=|<=|!=|>|<)\s*(.+)", condition)
        if match:
            try:
                return COMPARISONS[match[1]](float(value), float(match[2]))
            except (TypeError, ValueError):
                return match[1] == "!=" and str(value) != match[2]
    return bool(value == condition) and isinstance(value, bool) == isinstance(condition, bool)


def accumulation(tokens_per_step: int, *, tokens_per_batch: int) -> int:
    """Micro batches per optimizer step that make up `tokens_per_step`.

    Raises:
        ValueError: they do not divide.
    """
    if tokens_per_step % tokens_per_batch:
        raise ValueError(
            f"hold.tokens_per_step={tokens_per_step} is no multiple of context_length x rows_per_batch x devices = "
            f"{tokens_per_batch}. Choose a multiple of that."
        )
    return tokens_per_step // tokens_per_batch


def _short_names(keys: list[str]) -> dict[str, str]:
    """The last part of each key where that is enough to tell them apart."""
    count = Counter(key.rpartition(".")[2] for key in keys)
    return {key: key if count[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in keys}


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
