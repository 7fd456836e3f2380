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
    rules:                            settings of some cells, in order
      - {when: {data.context_length: ">=2048"}, set: {trainer.rows_per_batch: 1}}
    include:                          more points, one by one
      - {data.context_length: 8192, attention.strategy: anchor}
    hold: {tokens_per_step: 8192}     trainer.accumulate follows

`when` is explained in conditions.py; resources, limits, objective and report in sweep_options.py.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.cells import Axis, Cell, Exclusion, Rule, expand
from workbench.config import check_key, flatten, read_yaml, schema, suggestion
from workbench.errors import UserError
from workbench.sweep_options import (
    Limits,
    Objective,
    Pivot,
    Resources,
    read_limits,
    read_objective,
    read_pivot,
    read_resources,
)

CELLS = ("name", "base", "set", "grid", "zip", "seeds", "exclude", "rules", "include", "hold")
OPTIONS = ("objective", "resources", "limits", "report")
KEYS = (*CELLS, *OPTIONS)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep file, read and checked against the config's keys."""

    name: str
    path: Path
    base: tuple[tuple[str, dict[str, Any]], ...]
    """Layers below the cells: (file, contents), then ('<file> set', overrides)."""
    axes: tuple[Axis, ...]
    include: tuple[dict[str, Any], ...]
    seeds: tuple[int, ...]
    exclude: tuple[Exclusion, ...]
    rules: tuple[Rule, ...]
    tokens_per_step: int | None
    objective: Objective
    resources: Resources
    limits: Limits
    pivot: Pivot

    @property
    def axis_keys(self) -> list[str]:
        """Keys of all axes, in the file's order; then what included points name besides."""
        of_points = (key for point in self.include for key in point)
        return list(dict.fromkeys([*(key for axis in self.axes for key in axis), *of_points]))

    def cells(self) -> Iterator[Cell]:
        """Every combination of the axes with every seed, the first axis slowest, then the included points."""
        return expand(self.axes, seeds=self.seeds, include=self.include, exclude=self.exclude, rules=self.rules)


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
    include = _include(contents.get("include") or [], [key for axis in axes for key in axis], problems)
    own_seed = next((layer["seed"] for _, layer in reversed(base) if "seed" in layer), 0)
    seeds = _seeds(contents.get("seeds", [own_seed]), problems)
    if not axes and not include and "seeds" not in contents and not problems:
        problems.append(
            "the grid is empty. Give grid at least one axis, for example attention.strategy: [full, anchor]."
        )
    axis_keys = list(dict.fromkeys(key for part in (*axes, *include) for key in part))
    sweep = Sweep(
        name=_name(contents.get("name", path.stem), problems),
        path=path,
        base=base,
        axes=axes,
        include=include,
        seeds=seeds,
        exclude=_exclude(contents.get("exclude") or [], axis_keys, problems),
        rules=_rules(contents.get("rules") or [], axis_keys, problems),
        tokens_per_step=_hold(contents.get("hold") or {}, problems),
        objective=read_objective(contents.get("objective"), problems),
        resources=read_resources(contents.get("resources"), problems),
        limits=read_limits(contents.get("limits"), problems),
        pivot=read_pivot(contents.get("report"), axis_keys, problems),
    )
    _check_conflicts(sweep, problems)
    if not problems:
        doubled = [name for name, count in Counter(cell.name for cell in sweep.cells()).items() if count > 1]
        problems.extend(f"the cell {name!r} stands twice in the grid. Remove the repeated value." for name in doubled)
        if all(cell.excluded_why for cell in sweep.cells()):
            problems.append("exclude leaves no cell. Narrow its when.")
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return sweep


def _check_conflicts(sweep: Sweep, problems: list[str]) -> None:
    """A setting has one place: an axis, set, a rule or hold."""
    fixed, by_rules = flatten(sweep.base[-1][1]), {key for _, then in sweep.rules for key in then}
    if sweep.tokens_per_step is not None and "trainer.accumulate" in {*sweep.axis_keys, *fixed, *by_rules}:
        problems.append("hold.tokens_per_step sets trainer.accumulate, so set, grid and rules cannot. Remove one.")
    problems.extend(f"{key} is both in set and an axis. Remove it from set." for key in fixed if key in sweep.axis_keys)
    problems.extend(f"rules set {key}, which is an axis. Use include or zip." for key in by_rules & {*sweep.axis_keys})


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


def _exclude(value: Any, axes: list[str], problems: list[str]) -> tuple[Exclusion, ...]:
    pairs = _when_pairs("exclude", value, "why", "reason", axes, problems)
    return tuple((when, str(why)) for when, why in pairs)


def _rules(value: Any, axes: list[str], problems: list[str]) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    for when, then in _when_pairs("rules", value, "set", "{key: value}", [*axes, "seed"], problems):
        if not isinstance(then, Mapping) or not then:
            problems.append(f"rules.set={then!r} must hold key: value pairs.")
            continue
        settings = flatten(dict(then))
        problems.extend(f"rules.set: {problem}" for key in settings if (problem := check_key(key)))
        rules.append((when, settings))
    return tuple(rules)


def _when_pairs(
    section: str, value: Any, other: str, meaning: str, axes: list[str], problems: list[str]
) -> list[tuple[dict[str, Any], Any]]:
    """(when, the other half) of each item of a list."""
    pairs: list[tuple[dict[str, Any], Any]] = []
    for item in value if isinstance(value, list) else [value]:
        if (
            not isinstance(item, Mapping)
            or set(item) != {"when", other}
            or not isinstance(item["when"], Mapping)
            or not item["when"]
        ):
            problems.append(f"{section} holds {item!r}. Write {{when: {{axis: value}}, {other}: {meaning}}}.")
            continue
        when = flatten(dict(item["when"]))
        for key in when:
            if key not in axes:
                problems.append(f"{section}.when: {key} is no axis of this sweep.{suggestion(key, axes)}")
        pairs.append((when, item[other]))
    return pairs


def _include(value: Any, axes: list[str], problems: list[str]) -> tuple[dict[str, Any], ...]:
    points: list[dict[str, Any]] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, Mapping) or not item:
            problems.append(f"include holds {item!r}. Write {{axis: value, axis: value}}.")
            continue
        point = flatten(dict(item))
        problems.extend(f"include: {problem}" for key in point if (problem := check_key(key)))
        wanted = axes or list(points[0] if points else point)
        if missing := [key for key in wanted if key not in point]:
            problems.append(f"include holds {point!r}, which says nothing of {', '.join(missing)}. Name every axis.")
            continue
        if "seed" in point:
            problems.append("include: seed is no axis. Write seeds: [0, 1].")
        points.append({key: point[key] for key in dict.fromkeys([*wanted, *point])})
    return tuple(points)


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
