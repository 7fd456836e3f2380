"""One experiment as frozen dataclasses, and the one place where its layers are merged.

defaults <- base YAML <- sweep cell <- command line. Every broken rule is reported at once, with key, value and remedy.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from datamodules.config import DataConfig
from modules.attention.config import AttentionConfig
from modules.optim import OptimizerConfig
from modules.precision import ALIASES, PrecisionName
from modules.presets import ModelConfig
from modules.rotary import RotaryConfig
from modules.shift_deviation import ShiftDeviationConfig
from workbench.errors import UserError
from workbench.references import ReferenceMistake, follow, is_reference


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long, in what precision and on what the model is trained."""

    precision: PrecisionName = "32-true"
    """Lightning's names. `true`: weights and computation; `mixed`: float32 weights under autocast."""
    bfloat16_products: Literal["auto", "native", "float32"] = "auto"
    """Who multiplies bfloat16 matrices: the device, or float32 with one rounding to bfloat16 of each result, as tensor
    cores do. `auto` takes float32 on CPUs without bfloat16 instructions, where torch is about 26 times slower."""
    compile: bool = False
    """Whether torch.compile translates the model's forward and backward pass. bfloat16 products are then the device's
    own, and roundings between operations that it fuses are dropped, those of the rotation excepted."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    devices: int = 1
    max_steps: int = 100
    """Optimizer steps."""
    rows_per_batch: int = 1
    """Rows in one forward pass on one device."""
    accumulate: int = 1
    """Forward passes per optimizer step."""
    log_every: int = 1
    """Steps between two points of the training metrics."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; one is always written after the last step."""

    def __post_init__(self) -> None:
        counts = ("devices", "max_steps", "rows_per_batch", "accumulate", "log_every", "checkpoint_every")
        given = {name: getattr(self, name) for name in counts}
        broken = [f"trainer.{name}={n} must be at least 1." for name, n in given.items() if n is not None and n < 1]
        if broken:
            raise ValueError("\n".join(broken))


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When the validation documents are scored, besides before the first and after the last step."""

    every: int | None = None
    """Steps between two validations."""
    shift_deviation: ShiftDeviationConfig = field(default_factory=ShiftDeviationConfig)
    """How far RoPE is from relative, measured while training."""

    def __post_init__(self) -> None:
        broken = self.shift_deviation.broken_rules("evaluation.shift_deviation")
        if self.every is not None and self.every < 1:
            broken.append(f"evaluation.every={self.every} must be at least 1, or null for none in between.")
        if broken:
            raise ValueError("\n".join(broken))


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where runs are recorded. The store itself is $WORKBENCH_HOME's, see workbench/tracking.py."""

    experiment: str = "workbench"
    """Name of the MLflow experiment."""

    def __post_init__(self) -> None:
        if not self.experiment:
            raise ValueError("tracking.experiment is empty. Give the MLflow experiment a name.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One experiment, complete."""

    name: str = "run"
    seed: int = 0
    """Seeds the initial weights and the order of the rows."""
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, anchors and padding included."""
        trainer = self.trainer
        return self.data.context_length * trainer.rows_per_batch * trainer.accumulate * trainer.devices


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain nested dictionary, loads back equal with `resolve`."""
    return dataclasses.asdict(config)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'data': {'corpus': x}} -> {'data.corpus': x}. An empty mapping stays a leaf."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def schema() -> dict[str, Any]:
    """Every config key and its type: {'data.context_length': int, ...}."""
    return _leaves(RunConfig)


def _leaves(cls: type, prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            leaves.update(_leaves(kind, f"{prefix}{name}."))  # type: ignore[arg-type]
        else:
            leaves[f"{prefix}{name}"] = kind
    return leaves


def kind_of(key: str, kinds: Mapping[str, Any]) -> Any:
    """The type of a setting, also inside a section whose names the user chooses: data.sources.NAME.corpus.

    None for what is no setting.
    """
    if key in kinds:
        return kinds[key]
    section, _, last = key.rpartition(".")
    if get_origin(kinds.get(section)) is dict:  # model.overrides.width
        return get_args(kinds[section])[1]
    named = get_args(kinds.get(section.rpartition(".")[0]))
    return get_type_hints(named[1]).get(last) if named and dataclasses.is_dataclass(named[1]) else None


def read_config(path: Path, overrides: Mapping[str, Any]) -> RunConfig:
    """A config file under command-line settings; named after the file unless it says otherwise."""
    return resolve(("", {"name": path.stem}), (str(path), read_yaml(path)), ("command line", overrides))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        UserError: no such file, no YAML (with the line), or no mapping.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path}: must hold keys and values (key: value).")
        # OmegaConf's loader and not PyYAML's: 1e-3 is a number, and a key given twice is an error.
        loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no UTF-8 text (byte {error.start}).") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: is no valid YAML: {getattr(error, 'problem', None) or error}.") from error
    return {str(key): value for key, value in loaded.items()}


def parse_assignments(words: Iterable[str]) -> dict[str, Any]:
    """['data.context_length=512'] -> {'data.context_length': 512}: values as YAML, text settings as they stand."""
    assignments: dict[str, Any] = {}
    kinds = schema()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"{word!r} has no value. Write key=value, for example attention.strategy=anchor.")
        if key in assignments:
            raise UserError(f"{key} is set twice on the command line.")
        if not text:  # `data.end_of_document=` is the empty text; null is written null
            assignments[key] = ""
            continue
        try:
            parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise UserError(f"{word}: the value is no valid YAML: {error}") from error
        value = parsed["value"]
        is_text = kind_of(key, kinds) in (str, str | None) and isinstance(value, bool | int | float)
        assignments[key] = text if is_text else value  # a name such as 10e2 or on needs no quotes here
    return assignments


def resolve(*layers: tuple[str, Mapping[str, Any]]) -> RunConfig:
    """Merges the layers, each (where it comes from, nested or dotted mapping), later ones winning.

    Raises:
        UserError: every unknown key, wrong type and broken rule of all layers, one line each.
    """
    tree = OmegaConf.structured(RunConfig)
    kinds = schema()
    problems: list[str] = []
    refused: list[str] = []
    given: dict[str, tuple[str, Any]] = {}
    for where, layer in layers:
        for key, value in _schema_leaves(layer, kinds).items():
            if is_reference(value) and check_key(key, kinds) is None:
                given[key] = where, value
                continue
            problem = check_key(key, kinds) or _check_kind(key, value, kinds)
            if problem is None:
                try:  # leaf by leaf, so that one mistake does not hide the next
                    tree = OmegaConf.merge(tree, _nested(key, value))
                    given[key] = where, value
                except (OmegaConfBaseException, ValueError, TypeError):
                    problem = f"{key}={value!r} must be {describe_kind(kind_of(key, kinds))}."
            if problem:
                problems.append(f"{_place(where, key)}: {problem}" if where else problem)
                refused.append(key)
    for key, (where, text) in given.items():  # after all layers, so that a reference follows every override
        if not is_reference(text):
            continue
        try:
            value = follow(text, partial(_value_of, given=given, tree=tree, kinds=kinds), start=key)
            problem = _check_kind(key, value, kinds)
            if problem is None:
                tree = OmegaConf.merge(tree, _nested(key, value))
        except (OmegaConfBaseException, TypeError):
            problem = f"{key}={text!r} must be {describe_kind(kind_of(key, kinds))}, not {value!r}."
        except ReferenceMistake as error:
            problem = f"{key}={text!r} {error}"
        if problem:
            problems.append(f"{_place(where, key)}: {problem}" if where else problem)
            refused.append(key)
    sections: dict[str, Any] = {}
    for item in dataclasses.fields(RunConfig):
        try:
            value = tree[item.name]
            sections[item.name] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
        except (ValueError, OmegaConfBaseException) as error:
            broken = [line for line in str(error.__cause__ or error).splitlines() if not _names_one(line, refused)]
            problems.extend(_with_place(line, layers, kinds) for line in broken)
    if not 0 <= sections.get("seed", 0) < 2**63:
        seed = f"seed={sections['seed']} must be from 0 to 2^63 - 1."
        problems.append(_with_place(seed, layers, kinds))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return RunConfig(**sections)


def _value_of(key: str, given: Mapping[str, tuple[str, Any]], tree: Any, kinds: Mapping[str, Any]) -> Any:
    """What a reference stands for: as the topmost layer wrote it (perhaps a reference again), else the default."""
    if problem := check_key(key, kinds):
        raise ReferenceMistake(f"refers to what is none: {problem}")
    return given[key][1] if key in given else OmegaConf.select(tree, key)


def _names_one(problem: str, refused: Iterable[str]) -> bool:
    """Whether a broken rule is about a key whose value was refused and so never arrived: it follows from that."""
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", problem) for key in refused)


def _with_place(problem: str, layers: tuple[tuple[str, Mapping[str, Any]], ...], kinds: Mapping[str, Any]) -> str:
    """Puts the layer that set a value in front of a sentence that begins 'key=value'."""
    key = problem.partition("=")[0]
    for where, layer in reversed(layers):
        if where and key in _schema_leaves(layer, kinds):
            return f"{_place(where, key)}: {problem}"
    return problem


def _place(where: str, key: str) -> str:
    """'file.yaml:12' where `where` is a YAML file that sets the dotted key, else `where`."""
    if not Path(where).is_file():
        return where
    node, parts = yaml.compose(Path(where).read_text(encoding="utf-8"), Loader=yaml.SafeLoader), key.split(".")
    line = None
    while parts and isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            words = str(name.value).split(".")
            if words == parts[: len(words)]:
                line, node, parts = name.start_mark.line + 1, value, parts[len(words) :]
                break
        else:
            break
    return f"{where}:{line}" if line else where


def _schema_leaves(layer: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens down to the schema's leaves: the value of a dictionary-typed key stays whole."""
    flat: dict[str, Any] = {}
    for key, value in layer.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and (name not in kinds or _holds_sections(kinds[name])):
            if value:
                flat.update(_schema_leaves(value, kinds, f"{name}."))
            elif name in kinds or not any(known.startswith(f"{name}.") for known in kinds):
                flat[name] = value
        else:
            flat[name] = value
    return flat


def _holds_sections(kind: Any) -> bool:
    """Whether a dictionary-typed key has sections for values."""
    return get_origin(kind) is dict and dataclasses.is_dataclass(get_args(kind)[1])


def check_key(key: str, kinds: Mapping[str, Any] | None = None) -> str | None:
    """None for a key of the config, else a sentence that says so and suggests the right one."""
    kinds = schema() if kinds is None else kinds
    kind = kind_of(key, kinds)
    if dataclasses.is_dataclass(kind):
        inside = ", ".join(f"{key}.{item.name}" for item in dataclasses.fields(kind))
        return f"{key} is a section, not a setting. It holds {inside}."
    if kind is not None:
        return None
    section = kinds.get(key.rpartition(".")[0].rpartition(".")[0])
    if _holds_sections(section):  # a misspelt setting of a named section
        prefix = key.rpartition(".")[0]
        known = [f"{prefix}.{item.name}" for item in dataclasses.fields(get_args(section)[1])]
        return f"{key} is no setting.{suggestion(key, known) or ' There are ' + ', '.join(known) + '.'}"
    if any(known.startswith(f"{key}.") for known in kinds):
        inside = ", ".join(known for known in kinds if known.startswith(f"{key}."))
        return f"{key} is a section, not a setting. It holds {inside}."
    return f"{key} is no setting.{suggestion(key, kinds)}"


def suggestion(word: str, known: Iterable[str]) -> str:
    """' Did you mean data.context_length?', or the empty string."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    if not close:  # the last part may be right under a wrong section
        last = word.rpartition(".")[2]
        by_last = {name.rpartition(".")[2]: name for name in known}
        close = [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)]
    return f" Did you mean {close[0]}?" if close else ""


def _check_kind(key: str, value: Any, kinds: Mapping[str, Any]) -> str | None:
    """What OmegaConf would convert silently or explain poorly."""
    kind = kind_of(key, kinds)
    if kind is PrecisionName and str(value) in ALIASES:
        return f"{key}={value!r} is an alias of Lightning's. Write {ALIASES[str(value)]}."
    if not isinstance(value, str) and "${" in str(value):
        return f"{key}={value!r} holds a reference inside. Only a whole setting can be one: write the value itself."
    if kind in (str, str | None) and isinstance(value, bool | int | float):
        return f"{key}={value!r} must be text. Put it in quotes."
    if kind in (int, int | None) and isinstance(value, str) and not re.fullmatch(r"[+-]?\d+", value):
        return f"{key}={value!r} must be a whole number.{_whole_number(value)}"
    return None


def _nested(key: str, value: Any) -> dict[str, Any]:
    """('data.corpus', x) -> {'data': {'corpus': x}}"""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _whole_number(text: str) -> str:
    """For '128K': ' Write 131072.'"""
    match = re.fullmatch(r"(\d+)\s*([kKmM])[iI]?[bB]?", text)
    if not match:
        return ""
    return f" Write {int(match[1]) * 1024 ** (1 if match[2] in 'kK' else 2)}."


def describe_kind(kind: Any) -> str:
    """A type in words: 'a whole number', 'one of full, anchor'."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if kind in names:
        return names[kind]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is dict:
        return "keys and values"
    if kind in (list[float], list[int]):
        return f"a list of {'whole ' * (kind == list[int])}numbers"
    return " or ".join(describe_kind(part) for part in get_args(kind)) or str(kind)
