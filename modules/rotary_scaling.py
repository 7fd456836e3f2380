"""How rotary frequencies change for contexts longer than a model was made for: the setting and its rules.

    type      what becomes of the frequencies theta^(-2i / R)                 attention factor   depends on length
    default   nothing                                                         1
    linear    all divided by the factor (positions are interpolated)          1
    ntk       theta becomes theta * factor^(R / (R - 2)): the last one is     1
              divided by the factor, the first kept
    dynamic   as ntk, by how much longer the sequence is than the original    1                  yes
    yarn      divided where they turn less than beta_slow times in the        0.1 ln(factor) + 1
              original length, kept above beta_fast, a ramp between
    llama3    the same idea in wavelengths, between low and high_freq_factor  1
    longrope  divided one by one by a list: a short and a long one            sqrt(1 + ln(factor) / ln(original))   yes

The attention factor multiplies cosine and sine of queries and keys alike, so scores by its square. The numbers are
made in `modules/rotary_frequencies.py`.

Shape letters: D width of a head, R its first dimensions that turn: all of them, but for partial rotary.
Sources: linear, arXiv 2306.15595; ntk, dynamic and yarn, arXiv 2309.00071; longrope, arXiv 2402.13753; llama3, the
reference code of Llama 3.1; names as in transformers 5, `modeling_rope_utils.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

RopeType = Literal["default", "linear", "dynamic", "ntk", "yarn", "llama3", "longrope"]

_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "ntk": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
_MEANING = {
    "factor": "how many times longer the context becomes",
    "low_freq_factor": "frequencies that turn fewer times than this in the original length are divided, e.g. 1.0",
    "high_freq_factor": "frequencies that turn more often than this in the original length are kept, e.g. 4.0",
    "short_factor": "a divisor for each frequency, for sequences up to the original length",
    "long_factor": "a divisor for each frequency, for sequences longer than that",
    "original_max_position_embeddings": "positions the model was made for before the scaling",
}


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """How the frequencies change for longer contexts. Names as in Hugging Face's `rope_parameters`.

    Its rules are reported by whoever holds one (`broken_rules`), so that they come with all other broken rules.
    """

    rope_type: RopeType | None = None
    """See the table above. None: the model's own scaling, and then all else is None too."""
    factor: float | None = None
    """How many times longer the context becomes, at least 1."""
    original_max_position_embeddings: int | None = None
    """Positions before the scaling. None: the model's own number of them."""
    attention_factor: float | None = None
    """yarn, longrope: what cosine and sine are multiplied by. None: from the factor."""
    beta_fast: float | None = None
    """yarn: turns in the original length from which a frequency is kept. None: 32."""
    beta_slow: float | None = None
    """yarn: turns up to which it is divided. None: 1."""
    mscale: float | None = None
    """yarn, with `mscale_all_dim`: the attention factor is (0.1 mscale ln(factor) + 1) over the same of the other."""
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    """yarn: the ramp begins and ends at whole pairs. None: true."""
    low_freq_factor: float | None = None
    """llama3."""
    high_freq_factor: float | None = None
    """llama3."""
    short_factor: list[float] | None = None
    """longrope, one for each pair that turns."""
    long_factor: list[float] | None = None
    """longrope, one for each pair that turns."""
    partial_rotary_factor: float | None = None
    """Share of each head's dimensions that turn, the first ones. None: the model's own, or else all of them."""

    @property
    def depends_on_length(self) -> bool:
        """Whether longer sequences have other frequencies."""
        return self.rope_type in ("dynamic", "longrope")

    def turning_width(self, head_width: int) -> int:
        """R, of D."""
        return int(head_width * _first(self.partial_rotary_factor, 1.0))

    def broken_rules(self, section: str = "rotary.scaling", *, complete: bool = False) -> list[str]:
        """A sentence for every broken rule, each beginning with section.key=value.

        Args:
            section: what the keys stand under.
            complete: also miss what `completed` would fill in.
        """
        kind = self.rope_type
        if kind is None:
            given = [name for name in self._given() if name != "rope_type"]
            broken = [
                f"{section}.{name}={getattr(self, name)!r} has no effect without a type. Set {section}.rope_type too."
                for name in given
            ]
            if complete:
                broken.append(f"{section}.rope_type=None must be one of {', '.join(get_args(RopeType))}.")
            return broken
        if kind not in _NEEDED:
            choices = ", ".join(get_args(RopeType))
            return [f"{section}.rope_type={kind!r} is not known. Set one of: {choices}."]
        needed, optional = _NEEDED[kind], _OPTIONAL.get(kind, ())
        filled_in = () if complete else ("original_max_position_embeddings",)
        broken = [
            f"{section}.{name}=None is needed by rope_type={kind!r}: {_MEANING[name]}. Set {section}.{name}."
            for name in needed
            if getattr(self, name) is None and name not in filled_in
        ]
        if kind == "longrope" and self.factor is None and self.attention_factor is None:
            broken.append(
                f"{section}.factor=None is needed by rope_type='longrope' for its attention factor: "
                f"{_MEANING['factor']}. Set {section}.factor, or {section}.attention_factor itself."
            )
        allowed = {"rope_type", "partial_rotary_factor", *needed, *optional}
        broken += [
            f"{section}.{name}={getattr(self, name)!r} means nothing to rope_type={kind!r}. Leave it out."
            for name in self._given()
            if name not in allowed
        ]
        return broken + self._broken_values(section, allowed)

    def _broken_values(self, section: str, allowed: set[str]) -> list[str]:
        broken, in_words = [], f"from {LOWEST:g} to {HIGHEST:g}"

        def rule(name: str, holds: bool, text: str) -> None:
            if not holds:
                broken.append(f"{section}.{name}={getattr(self, name)!r} {text}.")

        for name in self._given():
            value = getattr(self, name)
            if name not in allowed:
                continue
            if name == "factor":
                rule(name, 1 <= value <= HIGHEST, f"must be a finite number, at least 1 and at most {HIGHEST:g}")
            elif name == "original_max_position_embeddings":
                rule(name, 2 <= value <= MOST_POSITIONS, f"must be at least 2 and at most {MOST_POSITIONS}")
            elif name == "partial_rotary_factor":
                rule(name, 0 < value <= 1, "must be above 0 and at most 1")
            elif name in ("short_factor", "long_factor"):
                rule(name, all(LOWEST <= x <= HIGHEST for x in value), f"must hold finite numbers above 0: {in_words}")
            elif name not in ("rope_type", "truncate"):
                rule(name, LOWEST <= value <= HIGHEST, f"must be a finite number above 0: {in_words}")
        if "low_freq_factor" in allowed and self.low_freq_factor is not None and self.high_freq_factor is not None:
            above = f"must be above low_freq_factor={self.low_freq_factor!r}"
            rule("high_freq_factor", self.high_freq_factor > self.low_freq_factor, above)
        if "beta_fast" in allowed:
            slow = BETA_SLOW if self.beta_slow is None else self.beta_slow
            fast = BETA_FAST if self.beta_fast is None else self.beta_fast
            rule("beta_fast" if self.beta_fast is not None else "beta_slow", fast > slow,
                 f"does not fit: beta_fast={fast:g} must be above beta_slow={slow:g}")  # fmt: skip
            alone = (self.mscale is None) != (self.mscale_all_dim is None)
            name = "mscale" if self.mscale is not None else "mscale_all_dim"
            rule(name, not alone, "has no effect alone: set both mscale and mscale_all_dim, or attention_factor")
            both = self.attention_factor is not None and self.mscale is not None
            rule("attention_factor", not both, "and mscale contradict each other. Leave one out")
        return broken

    def misfits(self, section: str = "rotary.scaling", *, head_width: int, theta: float) -> list[str]:
        """What does not fit a model, a sentence each. The scaling itself must hold its rules."""
        width = self.turning_width(head_width)
        broken = []
        if width < 2 or width % 2:
            broken.append(
                f"{section}.partial_rotary_factor={self.partial_rotary_factor!r} turns {width} of {head_width} "
                "dimensions. Set one that gives an even number, at least 2."
            )
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != width // 2:
                broken.append(
                    f"{section}.{name} holds {len(factors)} numbers, but {width} of {head_width} dimensions turn: "
                    f"give {width // 2}."
                )
        if self.rope_type in ("dynamic", "ntk") and width <= 2:
            broken.append(
                f"{section}.rope_type={self.rope_type!r} needs heads of which more than {width} dimensions turn."
            )
        if self.rope_type == "yarn" and theta <= 1:
            broken.append(f"{section}.rope_type='yarn' needs a theta above 1, but it is {theta:g}.")
        return broken

    def completed(self, own: "ScalingConfig", *, max_positions: int) -> "ScalingConfig":
        """What a model uses under this setting.

        Args:
            own: the model's own scaling, complete: taken whole where this names no type, else only for the share of
                dimensions that turn and the original length.
            max_positions: positions the model is made for by itself; the original length where `own` has none.
        """
        if self.rope_type is None:
            return own
        result = replace(self, partial_rotary_factor=_first(self.partial_rotary_factor, own.partial_rotary_factor))
        if "original_max_position_embeddings" not in _NEEDED[self.rope_type]:
            return result
        original = _first(self.original_max_position_embeddings, own.original_max_position_embeddings, max_positions)
        return replace(result, original_max_position_embeddings=original)

    @classmethod
    def of_hugging_face(cls, config_json: Mapping[str, Any]) -> tuple["ScalingConfig", float | None]:
        """The complete scaling and theta (None: not given) that transformers would read from a `config.json`.

        Takes both forms, `rope_parameters` and the older `rope_scaling` beside `rope_theta`. Where a form leaves the
        original length or the factor open, they follow from `max_position_embeddings` as in transformers. Known fields
        that the type does not read are left out, as transformers ignores them.

        Raises:
            ValueError: an unknown type or field, a missing one, or a value out of range; all at once.
        """
        section, given = _rope_section(config_json)
        found = {key: value for key, value in given.items() if value is not None and key not in _WITHOUT_EFFECT}
        theta = found.pop("rope_theta", config_json.get("rope_theta"))
        old_name = found.pop("type", None)
        kind = found.pop("rope_type", old_name)
        if kind is None and (untyped := [name for name in found if name != "partial_rotary_factor"]):
            raise ValueError(
                f"{section}.{untyped[0]}={found[untyped[0]]!r} has no effect without a type: {section} names none. "
                f"Write {section}.rope_type too, or leave {section}.{untyped[0]} out."
            )
        kind = kind or "default"
        fraction = config_json.get("partial_rotary_factor")
        if fraction is not None:
            found.setdefault("partial_rotary_factor", fraction)
        kinds = {item.name: item.type for item in fields(cls)}
        broken = [
            f"{section}.{key}={value!r} is not known, so its effect on the frequencies would be lost."
            for key, value in found.items()
            if key not in kinds
        ]
        broken += [
            f"{section}.{key}={value!r} must be {_KIND_IN_WORDS[str(kinds[key])]}."
            for key, value in found.items()
            if key in kinds and not _fits(value, str(kinds[key]))
        ]
        if theta is not None and not (_fits(theta, "float | None") and 0 < theta < math.inf):
            broken.append(f"{section}.rope_theta={theta!r} must be a finite number above 0.")
        for key in ("max_position_embeddings", "original_max_position_embeddings"):
            if (value := config_json.get(key)) is not None and not _fits(value, "int | None"):
                broken.append(f"{key}={value!r} must be a whole number.")
        if not isinstance(kind, str) or kind not in _NEEDED or kind == "ntk":
            known = ", ".join(name for name in _NEEDED if name != "ntk")
            broken.append(f"{section}.rope_type={kind!r} is not known. Known: {known}.")
        if broken:
            raise ValueError("\n".join(broken))
        allowed = {"partial_rotary_factor", *_NEEDED[kind], *_OPTIONAL.get(kind, ())}
        found = {key: value for key, value in found.items() if key in allowed}
        found |= _filled_in(kind, found, config_json)
        scaling = cls(rope_type=kind, **found)
        if broken := scaling.broken_rules(section, complete=True):
            raise ValueError("\n".join(broken))
        return scaling, None if theta is None else float(theta)

    def to_hugging_face(self, *, theta: float, head_width: int, max_positions: int) -> dict[str, Any]:
        """The keys of a `config.json` that make transformers compute the same frequencies.

        `ntk` becomes the theta it stands for, and `dynamic` the original length as `max_position_embeddings`, where
        transformers looks for it.
        """
        parameters = {name: getattr(self, name) for name in self._given()}
        if self.rope_type == "ntk":
            theta = ntk_theta(theta, float(parameters.pop("factor")), self.turning_width(head_width))
            parameters["rope_type"] = "default"
        if self.rope_type == "dynamic":
            max_positions = parameters.pop("original_max_position_embeddings")
        return {"rope_parameters": {**parameters, "rope_theta": theta}, "max_position_embeddings": max_positions}

    def _given(self) -> list[str]:
        return [item.name for item in fields(self) if getattr(self, item.name) is not None]


NO_SCALING = ScalingConfig(rope_type="default")
"""The frequencies as theta makes them."""

LOWEST, HIGHEST = 1e-6, 1e6
"""Of all settings: numbers outside mean nothing, and powers and logarithms of them leave the range of float32."""
MOST_POSITIONS = 2**40

BETA_FAST, BETA_SLOW = 32.0, 1.0
"""What yarn takes where its setting leaves them open."""
_WITHOUT_EFFECT = ("finetuned",)
"""A remark in older configurations that no code reads."""
_KIND_IN_WORDS = {
    "float | None": "a number",
    "int | None": "a whole number",
    "bool | None": "true or false",
    "list[float] | None": "a list of numbers",
}


def ntk_theta(theta: float, growth: float, width: int) -> float:
    """The base under which the last frequency of R = width is divided by `growth`."""
    return theta * growth ** (width / (width - 2))


def _rope_section(config_json: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and content of what a `config.json` says of the frequencies.

    Raises:
        ValueError: no keys and values, others for each type of layer, or two forms that contradict each other.
    """
    both = {name: config_json[name] for name in ("rope_parameters", "rope_scaling") if config_json.get(name)}
    for section, given in both.items():
        if not isinstance(given, Mapping):
            raise ValueError(f"{section}={given!r} must hold keys and values.")
        nested = [name for name, value in given.items() if isinstance(value, Mapping)]
        if nested:
            raise ValueError(
                f"{section} has frequencies of their own for layers of type {', '.join(nested)}. Models whose layers "
                "differ in their frequencies are not supported, only one setting for all layers."
            )
    if len(both) == 2 and _said(both["rope_parameters"], config_json) != _said(both["rope_scaling"], config_json):
        raise ValueError(
            f"rope_parameters={both['rope_parameters']!r} and rope_scaling={both['rope_scaling']!r} say different "
            "things of the frequencies. Leave one out."
        )
    return next(iter(both.items()), ("rope_parameters", {}))


def _said(given: Mapping[str, Any], config_json: Mapping[str, Any]) -> dict[str, Any]:
    """A section in one form: newer names, theta with it."""
    found = {"rope_theta": config_json.get("rope_theta"), **given}
    old_name = found.pop("type", None)
    found.setdefault("rope_type", old_name)
    return {key: value for key, value in found.items() if value is not None and key not in _WITHOUT_EFFECT}


def _filled_in(kind: str, found: Mapping[str, Any], config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Original length and factor as transformers takes them from the rest of a `config.json`."""
    positions, filled = config_json.get("max_position_embeddings"), {}
    original: Any = None
    if kind == "dynamic":
        filled["original_max_position_embeddings"] = positions
    elif "original_max_position_embeddings" in _NEEDED[kind]:
        own = found.get("original_max_position_embeddings", positions)
        original = config_json.get("original_max_position_embeddings", own)
        filled["original_max_position_embeddings"] = original
    names_original = "original_max_position_embeddings" in {*found, *config_json}
    if kind in ("yarn", "longrope") and "factor" not in found and names_original and positions and original:
        filled["factor"] = positions / original
    if "attention_factor" in found or not (found.get("mscale") and found.get("mscale_all_dim")):
        filled |= {"mscale": None, "mscale_all_dim": None} if kind == "yarn" else {}
    return filled


def _fits(value: object, kind: str) -> bool:
    """Whether a JSON value may stand for a field: a whole number is a fine float, true and false are no numbers."""
    if kind.startswith("list"):
        return isinstance(value, list) and all(_fits(x, "float | None") for x in value)
    if kind.startswith("float"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind.startswith("int"):
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, bool)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
