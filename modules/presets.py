"""Shapes of known Llamas, and the settings that pick and change one.

    model.preset=llama3_8b  model.overrides={layers: 4}  ->  LlamaConfig, complete and checked

Sources: the `config.json` of the model named beside each published shape.
"""

import difflib
from dataclasses import dataclass, field, fields
from typing import Any

from modules.llama import LlamaConfig
from modules.rotary_scaling import NO_SCALING, ScalingConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A shape as published; `head_width` is width / heads in all of them. Fields as in `LlamaConfig`."""

    vocabulary_size: int | None
    """None: as many as the tokenizer has."""
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden_width: int
    norm_epsilon: float = 1e-5
    tied_embeddings: bool = False
    rope_theta: float = 10_000.0
    max_positions: int = 2048
    rope_scaling: ScalingConfig = NO_SCALING


PRESETS: dict[str, Preset] = {
    # Ours, for tests and laptops. Parameters with the byte vocabulary of 258: 1.0 and 15 million.
    "debug": Preset(
        vocabulary_size=None, width=128, layers=4, heads=4, kv_heads=2, hidden_width=512, tied_embeddings=True,
    ),
    "tiny": Preset(
        vocabulary_size=None, width=384, layers=8, heads=6, kv_heads=2, hidden_width=1280, tied_embeddings=True,
    ),
    # Published.
    "smollm2_135m": Preset(  # HuggingFaceTB/SmolLM2-135M
        vocabulary_size=49_152, width=576, layers=30, heads=9, kv_heads=3, hidden_width=1536,
        tied_embeddings=True, rope_theta=100_000.0, max_positions=8192,
    ),
    "tinyllama_1_1b": Preset(  # TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T
        vocabulary_size=32_000, width=2048, layers=22, heads=32, kv_heads=4, hidden_width=5632,
    ),
    "llama3_2_1b": Preset(  # meta-llama/Llama-3.2-1B
        vocabulary_size=128_256, width=2048, layers=16, heads=32, kv_heads=8, hidden_width=8192,
        tied_embeddings=True, rope_theta=500_000.0, max_positions=131_072,
        rope_scaling=ScalingConfig(
            rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "llama2_7b": Preset(  # meta-llama/Llama-2-7b-hf
        vocabulary_size=32_000, width=4096, layers=32, heads=32, kv_heads=32, hidden_width=11_008, max_positions=4096,
    ),
    "llama3_8b": Preset(  # meta-llama/Meta-Llama-3-8B
        vocabulary_size=128_256, width=4096, layers=32, heads=32, kv_heads=8, hidden_width=14_336,
        rope_theta=500_000.0, max_positions=8192,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained."""

    preset: str | None = None
    """A name in PRESETS. None: the checkpoint's shape, without a checkpoint `debug`."""
    checkpoint: str | None = None
    """Folder or hub name (organisation/name) of a Hugging Face checkpoint whose shape and weights training starts from.
    `rotary.theta`, `rotary.scaling` and `max_positions` apply on top."""
    max_positions: int | None = None
    """Positions the model is made for. None: the preset's or checkpoint's."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of `LlamaConfig` that differ from the preset. Without `head_width` a head is width / heads wide."""

    def __post_init__(self) -> None:
        broken = []
        if self.preset is not None and self.preset not in PRESETS:
            broken.append(f"model.preset={self.preset!r} is not known.{_suggestion(self.preset, list(PRESETS))}")
        if self.checkpoint is not None and self.preset is not None:
            broken.append(
                f"model.checkpoint={self.checkpoint!r} and model.preset={self.preset!r} contradict each other: a "
                "checkpoint brings its own shape. Leave one out (model.preset=null)."
            )
        if self.checkpoint == "":
            broken.append("model.checkpoint is empty. Set a folder or a hub name, or null for random weights.")
        if self.max_positions is not None and self.max_positions < 1:
            broken.append(f"model.max_positions={self.max_positions} must be at least 1, or null for the preset's.")
        if (
            self.max_positions is not None
            and self.overrides.get("max_positions", self.max_positions) != self.max_positions
        ):
            broken.append(
                f"model.max_positions={self.max_positions} and model.overrides.max_positions="
                f"{self.overrides['max_positions']!r} contradict each other. Leave one out."
            )
        for key, value in self.overrides.items():
            if key not in _FIELD_TYPES:
                broken.append(f"model.overrides.{key} is not known.{_suggestion(key, list(_FIELD_TYPES))}")
            elif not _fits(value, _FIELD_TYPES[key]):
                broken.append(f"model.overrides.{key}={value!r} must be of type {_FIELD_TYPES[key].__name__}.")
        if broken:
            raise ValueError("\n".join(broken))

    def resolve(
        self,
        vocabulary_size: int,
        rope_theta: float | None = None,
        rope_scaling: ScalingConfig | None = None,
        *,
        checkpoint: LlamaConfig | None = None,
    ) -> LlamaConfig:
        """The complete shape.

        Args:
            vocabulary_size: the tokenizer's.
            rope_theta: `rotary.theta`, which wins over the preset's; None where it is not set.
            rope_scaling: `rotary.scaling`, which wins over the preset's where it names a type. The original length
                it leaves open is the preset's.
            checkpoint: the shape in `checkpoint`; None where none is named.
        Raises:
            ValueError: the tokenizer does not fit the vocabulary, sizes do not fit one another, or theta is set
                twice; all broken rules at once, with their keys.
        """
        base = PRESETS[self.preset or "debug"] if checkpoint is None else checkpoint
        overrides, broken = self.overrides, []
        if checkpoint is not None:
            broken += [
                f"model.overrides.{key}={value!r}, but the checkpoint has {getattr(checkpoint, key)!r}, and its "
                "weights mean nothing under another. Leave it out."
                for key, value in self.overrides.items()
                if key not in _FREE_OF_WEIGHTS and value != getattr(checkpoint, key)
            ]
            overrides = {key: value for key, value in overrides.items() if key in _FREE_OF_WEIGHTS}
        shape = {f.name: getattr(base, f.name) for f in fields(base)} | overrides
        if rope_scaling is not None:
            shape["rope_scaling"] = rope_scaling.completed(base.rope_scaling, max_positions=base.max_positions)
        if self.max_positions is not None:
            shape["max_positions"] = self.max_positions
        if rope_theta is not None:
            if self.overrides.get("rope_theta", rope_theta) != rope_theta:
                broken.append(
                    f"rotary.theta={rope_theta} and model.overrides.rope_theta={self.overrides['rope_theta']} "
                    "contradict each other. Leave one out."
                )
            shape["rope_theta"] = rope_theta
        if shape["vocabulary_size"] is None:
            shape["vocabulary_size"] = vocabulary_size
        elif vocabulary_size > shape["vocabulary_size"] and checkpoint is not None:
            broken.append(
                f"model.checkpoint: the checkpoint has {shape['vocabulary_size']} tokens, the tokenizer "
                f"{vocabulary_size}. Set data.tokenizer to the one it was trained with."
            )
        elif vocabulary_size > shape["vocabulary_size"]:
            broken.append(
                f"model.overrides.vocabulary_size: the model has {shape['vocabulary_size']} tokens, the tokenizer "
                f"{vocabulary_size}. Set it to at least {vocabulary_size}, or data.tokenizer to a smaller one."
            )
        if "head_width" not in shape:
            width, heads = shape["width"], shape["heads"]
            if heads >= 1 and width % heads:
                broken.append(
                    f"model.overrides.width: width={width} is no multiple of heads={heads}. "
                    "Change one of them or set model.overrides.head_width."
                )
            shape["head_width"] = max(width // max(heads, 1), 1)
        try:
            config = LlamaConfig(**shape)
        except ValueError as error:
            broken += [
                f"rotary.scaling.{line.removeprefix('rope_scaling.')}"
                if line.startswith("rope_scaling.")
                else f"model.overrides.{line}"
                for line in str(error).splitlines()
            ]
        if broken:
            raise ValueError("\n".join(broken))
        return config


_FIELD_TYPES: dict[str, type] = {f.name: f.type for f in fields(LlamaConfig) if f.name != "rope_scaling"}  # type: ignore[misc]
"""What may be overridden: the frequencies' scaling has a section of its own, `rotary.scaling`."""


_FREE_OF_WEIGHTS = ("max_positions", "rope_theta")
"""What a checkpoint's shape may be given anew: no weight depends on it."""


def _fits(value: object, expected: type) -> bool:
    """Whether a YAML value may stand for the type: a whole number is a fine float, true and false are no numbers."""
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, expected) and (expected is bool or not isinstance(value, bool))


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."
