"""What a probe compares: settings, their rules, and the conditions that follow from them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

from workbench.errors import UserError

if TYPE_CHECKING:
    import torch

    from modules.position_probe import Rotation

Mode = Literal["propagated", "shared"]
Rounded = Literal["tables", "rotated", "both"]

DTYPES = ("float32", "bfloat16", "float16", "float64")
PRECISIONS = ("float32_scores", "float32", "compute", "low_positions")
EXACT_INTEGERS = {"float64": 2**53, "float32": 2**24}
"""Positions are multiplied with frequencies in the wider of float32 and the rotary dtype, exact up to here."""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Everything that decides a probe's numbers, the model apart."""

    mode: Mode = "propagated"
    """`propagated`: each shift runs its own forward pass. `shared`: q and k of one float32 pass, turned by each."""
    tokens: int = 512
    """T, of a sequence."""
    lengths: tuple[int, ...] | None = None
    """Prefixes to report besides the whole sequence, in tokens. None: 64, 128, ... below it."""
    sequences: int = 4
    reference_shift: int = 16
    """s2: position of the first token in what the others are compared with."""
    shifts: tuple[int, ...] = (0, 18, 100, 1000, 8192, 32768)
    """s1, each."""
    precisions: tuple[str, ...] = PRECISIONS
    """`rotary.precision`, each."""
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """Of weights and activations, each. Under `shared` they are float32."""
    rotary_dtypes: tuple[str, ...] | None = None
    """What q and k are cast to before they are turned, each. None: the activations' (`shared`: bfloat16, float32)."""
    formats: tuple[str, ...] = ()
    """Emulated number formats, each: names or forms like e8m5; weights and all else are float32 then."""
    rounded: tuple[Rounded, ...] = ("both",)
    """What is rounded to an emulated format: cosine and sine, the turned q and k, or both."""
    random_weights: bool = True
    """Also probe the same shape with random weights, in the narrowest dtype."""
    offsets: tuple[int, ...] = (0, 32768)
    """Where a packed row begins whose logits are compared with those of positions that restart in each document."""
    corpus: str = "python_stdlib"
    tokenizer: str | None = None
    """None: the model's own; of a preset, bytes."""
    seed: int = 0
    """Of random weights and of which documents are read."""
    device: Literal["cpu", "cuda"] = "cpu"
    max_memory_gigabytes: float | None = None
    """Refuse what would need more. None: the machine's memory."""

    def __post_init__(self) -> None:
        """Raises UserError with all broken rules at once."""
        broken = [*self._broken_counts(), *self._broken_choices()]
        if not broken:
            broken = self._broken_positions()
        if broken:
            raise UserError("\n".join(broken))

    def _broken_counts(self) -> Iterator[str]:
        if self.tokens < 8:
            yield f"--tokens {self.tokens}: must be at least 8."
        for length in self.lengths or ():
            if not 2 <= length <= self.tokens:
                yield f"--lengths {length}: must be from 2 to --tokens {self.tokens}."
        if self.sequences < 1:
            yield f"--sequences {self.sequences}: must be at least 1."
        if not 0 <= self.seed < 2**63:
            yield f"--seed {self.seed}: must be from 0 to 2^63 - 1."
        for option, values in (("shifts", self.shifts), ("offsets", self.offsets)):
            for value in values:
                if value < 0:
                    yield f"--{option} {value}: must be at least 0."
            if len(set(values)) != len(values):
                yield f"--{option}: the same number stands there twice."
        if self.reference_shift < 0:
            yield f"--reference-shift {self.reference_shift}: must be at least 0."
        if self.reference_shift in self.shifts:
            yield f"--shifts {self.reference_shift}: is the reference shift, so nothing would differ. Leave it out."
        if not self.shifts:
            yield "--shifts: name at least one."
        memory = self.max_memory_gigabytes
        if memory is not None and not (math.isfinite(memory) and memory > 0):
            yield f"--max-memory {memory}: must be a number of gigabytes above 0."

    def _broken_choices(self) -> Iterator[str]:
        for option, values, known in (
            ("precisions", self.precisions, PRECISIONS),
            ("dtypes", self.dtypes, DTYPES),
            ("rotary-dtypes", self.rotary_dtypes or (), DTYPES),
            ("rounded", self.rounded, get_args(Rounded)),
            ("mode", (self.mode,), get_args(Mode)),
            ("device", (self.device,), ("cpu", "cuda")),
        ):
            for value in values:
                if value not in known:
                    yield f"--{option} {value}: is not known. Known: {', '.join(known)}."
        from modules.number_formats import NumberFormat

        for name in self.formats:
            try:
                NumberFormat.of(name)
            except ValueError as error:
                yield f"--formats: {error}"

    def _broken_positions(self) -> list[str]:
        last = max(self.reference_shift, *self.shifts, *self.offsets) + self.tokens - 1
        kinds = {condition.rotary_dtype for condition in self.conditions()}
        exact = min(EXACT_INTEGERS.get(kind, 2**24) for kind in kinds)
        if last > exact:
            return [
                f"positions reach {last}, but float32 holds whole numbers exactly only up to {exact}, so that shifts "
                "would become others. Use smaller --shifts and --offsets, or --dtypes float64 alone."
            ]
        low = [c for c in self.conditions() if c.rotary_precision == "low_positions" and c.rotary_dtype == "float16"]
        if low and last > 65504:
            return [
                f"positions reach {last}, but low_positions keeps them in float16, which ends at 65504. "
                "Use smaller --shifts and --offsets, or leave out one of --precisions low_positions, --dtypes float16."
            ]
        return []

    def all_lengths(self) -> tuple[int, ...]:
        """Prefix lengths to report, rising; the last is the whole sequence."""
        chosen = self.lengths or tuple(2**n for n in range(6, self.tokens.bit_length()))
        return tuple(sorted({length for length in chosen if length < self.tokens} | {self.tokens}))

    def conditions(self) -> list["Condition"]:
        """What is compared, with the dtype that the model is loaded in as outer order.

        Policies differ only where the rotation is narrower than float32: of those that compute the same numbers one
        is kept, `float32` where it is asked for.
        """
        if self.mode == "shared":
            pairs = [("float32", rotary) for rotary in self.rotary_dtypes or ("bfloat16", "float32")]
        else:
            pairs = [(dtype, rotary) for dtype in self.dtypes for rotary in self.rotary_dtypes or (dtype,)]
        found = []
        wide = ("float32",) if "float32" in self.precisions else self.precisions[:1]
        for dtype, rotary in pairs:
            for precision in wide if rotary in EXACT_INTEGERS else self.precisions:
                found.append(Condition(dtype=dtype, rotary_dtype=rotary, rotary_precision=precision))
        for name in self.formats:
            found += [
                Condition(dtype="float32", rotary_dtype=name, rotary_precision=f"emulated_{what}")
                for what in self.rounded
            ]
        return list(dict.fromkeys(found))

    def random_condition(self) -> "Condition | None":
        """The paper's third curve: random weights in the narrowest dtype, rounded as common code does."""
        low = [c for c in self.conditions() if c.rotary_dtype not in EXACT_INTEGERS and not c.emulated]
        if not (self.random_weights and low):
            return None
        usual = next((c for c in low if c.rotary_precision == "compute"), low[0])
        return Condition(
            dtype=usual.dtype, rotary_dtype=usual.rotary_dtype, rotary_precision=usual.rotary_precision,
            weights="random",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One way to compute the same thing."""

    dtype: str
    """Of weights and activations."""
    rotary_dtype: str
    """Of q and k while they turn, or the emulated format."""
    rotary_precision: str
    """`rotary.precision`, or `emulated_tables`, `emulated_rotated`, `emulated_both`."""
    weights: Literal["given", "random"] = "given"

    @property
    def emulated(self) -> bool:
        """Whether `rotary_dtype` is a number format that torch need not have."""
        return self.rotary_precision.startswith("emulated_")

    @property
    def label(self) -> str:
        """`bfloat16/compute`; with the rotary dtype where it differs: `float32/bfloat16/compute`."""
        parts = [self.dtype, self.rotary_dtype, self.rotary_precision]
        if self.dtype == self.rotary_dtype and not self.emulated:
            del parts[1]
        return "/".join(["random", *parts] if self.weights == "random" else parts)

    @property
    def torch_dtype(self) -> "torch.dtype":
        """Of weights and activations."""
        import torch

        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def rotation(self) -> "Rotation":
        """How q and k are turned."""
        import torch

        from modules.number_formats import NumberFormat
        from modules.position_probe import Rotation

        if not self.emulated:
            return Rotation(precision=self.rotary_precision, dtype=getattr(torch, self.rotary_dtype))  # type: ignore[arg-type]
        what, number_format = self.rotary_precision.removeprefix("emulated_"), NumberFormat.of(self.rotary_dtype)
        return Rotation(
            precision="float32_scores",
            dtype=torch.float32,
            tables_format=number_format if what in ("tables", "both") else None,
            rotated_format=number_format if what in ("rotated", "both") else None,
        )


QUICK = {
    "sequences": 1,
    "shifts": (0, 100, 2000, 32768),
    "dtypes": ("bfloat16",),
    "random_weights": False,
    "offsets": (0,),
}  # fmt: skip
"""Under a minute on two cores for 135 million parameters."""

PAPER = {
    "tokens": 8192,
    "lengths": (64, 128, 256, 512, 1024, 2048, 4096),
    "sequences": 50,
    "shifts": (0, 2, 4, 6, 8, 10, 12, 14, 15, 17, 18, 20, 22, 50, 100, 200, 500, 1000, 2000),
    "precisions": ("compute", "float32"),
    "offsets": (0,),
}  # fmt: skip
"""Shifts, lengths and sequences of arXiv 2411.13476, Figure 1; its D is that of the prefix of 4096 tokens."""

assert {*QUICK, *PAPER} <= {item.name for item in fields(ProbeSettings)}
