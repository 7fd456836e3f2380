"""What the data settings are: which text, how it becomes tokens, how documents become rows."""

import math
from dataclasses import dataclass, field, fields
from typing import Literal, get_args, get_origin, get_type_hints

from datamodules.sources.config import SourceConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    """Documents and the rows made of them. The settings of one source stand here; of several in `sources`.

    Raises:
        ValueError: one line for every setting out of range.
    """

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Several sources by their names, each with `corpus` and the other settings of a source. Empty: the one that
    `corpus` names."""
    mix: dict[str, float] = field(default_factory=dict)
    """Weights of sources by name, in training tokens; those not named are left out. Empty: every document once."""
    mix_tokens: int | None = None
    """Training tokens of the mix; null is as many as its sources hold. Sources repeat or are thinned to fit."""
    upsample_longer_than: int | None = None
    """Repeat documents of more tokens than this within each source, in place of shorter ones; null for no."""
    keep_shorter: float = 0.1
    """Share of the shorter documents' tokens that stays when long ones are repeated."""
    tokenizer: str = "auto"
    """`byte`, or the path of a saved Hugging Face `tokenizer.json` or of the folder that holds one. `auto`: that of
    `model.checkpoint`, an error if it has none; without a checkpoint `byte`."""
    context_length: int = 2048
    """Length of a row in tokens, anchors included."""
    packing: Literal["concatenate", "best_fit", "one_per_row"] = "concatenate"
    """`concatenate`: documents end to end, cut at row ends. `best_fit`: no document that fits a row is cut.
    `one_per_row`: a row holds one document or one piece of a long one, and padding."""
    long_documents: Literal["split", "truncate", "drop"] = "split"
    """What happens to a document longer than a whole row."""
    tail: Literal["drop", "pad"] = "drop"
    """What happens to the last, partly filled row of `concatenate` (the other packings pad every row)."""
    anchor: Literal["auto", "row_start", "every_document", "none"] = "auto"
    """Where anchor (BOS) tokens stand: one that the row shares, one before each document, none; `auto` asks the
    attention strategy."""
    positions: Literal["auto", "continuous", "reset"] = "auto"
    """Position of a token: its index in the row, or restarted in each document; `auto` asks the strategy."""
    labels: Literal["within_document", "across"] = "within_document"
    """Whether a document's last token has to predict the next document's first."""
    domain_tags: bool = False
    """Whether the name of its source stands as text in front of each training document, seen and never predicted."""
    interleave: bool = False
    """Whether a training row's documents of at most 2048 tokens are cut in 2 or 3 pieces, and all pieces shuffled, each
    document's in their own order. Attention goes by document, not by piece."""
    anchor_token: str | None = None
    """Text of the anchor token; None is the tokenizer's own BOS."""
    end_of_document: str | None = None
    """Text of the token that ends each document and belongs to it; None is the tokenizer's EOS, "" is none."""
    validation_fraction: float = 0.05
    """About this share of the documents is kept for validation."""
    validation_tokens: int = 65536
    """At most so many tokens are kept for validation."""
    shuffle_seed: int = 0
    """Decides which documents validate and in which order the others are packed; not the order of rows."""
    workers: int = 0
    """Processes that make rows beside the training process; 0 makes them in it."""
    processes: int = 0
    """Processes that tokenise; 0 is one for each core."""

    def __post_init__(self) -> None:
        broken = [f"data.{line}" for line in self.broken_source_rules()] + self._broken_sources()
        for name, kind in get_type_hints(type(self)).items():  # OmegaConf checks these too, plain Python does not
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                broken.append(f"data.{name}={getattr(self, name)!r} is none of {', '.join(get_args(kind))}.")
        broken += self._broken_mix()
        if self.interleave and self.packing == "one_per_row":
            broken.append(
                "data.interleave=true says nothing with data.packing='one_per_row': pieces of one document keep their "
                "order. Set data.packing to 'concatenate' or 'best_fit', or data.interleave=false."
            )
        if not self.tokenizer:
            broken.append("data.tokenizer is empty. Set byte or the path of a tokenizer.json.")
        if self.context_length < 2:
            broken.append(f"data.context_length={self.context_length} leaves nothing to predict. Set 2 or more tokens.")
        if not 0 < self.validation_fraction < 1:
            broken.append(
                f"data.validation_fraction={self.validation_fraction} leaves no document to validate or to train on. "
                "Set a share between 0 and 1, such as 0.05."
            )
        if self.validation_tokens < 2:
            broken.append(f"data.validation_tokens={self.validation_tokens} allows no target. Set 2 or more tokens.")
        if self.shuffle_seed < 0:
            broken.append(f"data.shuffle_seed={self.shuffle_seed} is no seed. Set 0 or more.")
        if self.workers < 0:
            broken.append(f"data.workers={self.workers} is no number of processes. Set 0 or more.")
        if self.processes < 0:
            broken.append(f"data.processes={self.processes} is no number of processes. Set 0 or more.")
        if broken:
            raise ValueError("\n".join(broken))

    def _broken_mix(self) -> list[str]:
        broken = [
            f"data.mix.{name}={weight!r} is no weight. Set 0 or more."
            for name, weight in self.mix.items()
            if not 0 <= weight < math.inf
        ]
        if self.mix and not broken and not any(self.mix.values()):
            broken.append(f"data.mix={self.mix!r} weighs every source 0. Set a weight above 0 for one of them.")
        if self.mix_tokens is not None and not self.mix:
            broken.append(f"data.mix_tokens={self.mix_tokens} says nothing without data.mix. Set weights, or null.")
        if self.mix_tokens is not None and self.mix_tokens < 1:
            broken.append(f"data.mix_tokens={self.mix_tokens} leaves nothing. Set 1 or more, or null.")
        if self.upsample_longer_than is not None and self.upsample_longer_than < 1:
            broken.append(f"data.upsample_longer_than={self.upsample_longer_than} is no length. Set 1 or more tokens.")
        if not 0 <= self.keep_shorter <= 1:
            broken.append(f"data.keep_shorter={self.keep_shorter} is no share. Set a number from 0 to 1.")
        return broken

    def _broken_sources(self) -> list[str]:
        if not self.sources:
            return []
        broken = [
            f"data.sources.{name}.{line}" for name, each in self.sources.items() for line in each.broken_source_rules()
        ]
        beside = [each.name for each in fields(SourceConfig) if getattr(self, each.name) != each.default]
        return broken + [
            f"data.{name}={getattr(self, name)!r} says nothing beside data.sources. Move it into "
            f"data.sources.NAME.{name}."
            for name in beside
        ]
