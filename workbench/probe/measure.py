"""Runs a probe: every condition over every sequence, one model in memory at a time."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from modules.llama import Llama, LlamaConfig, parameter_count
from modules.position_probe import propagate, share
from modules.positional_consistency import Consistency, compare_logits, logits_at_once
from modules.precision import resolve_bfloat16_products
from modules.shift_deviation import SCORES_AT_ONCE, DeviationSums, ShiftDeviation
from workbench.errors import UserError
from workbench.probe.sequences import as_rows, positions_in_documents
from workbench.probe.settings import Condition, ProbeSettings

PROCESS_BYTES = 650e6
"""Python with torch, MLflow, a tokenizer of 50 000 tokens and matplotlib."""
ALLOCATOR_SHARE = 1.3
"""What the process holds over what is in use: memory that was given back comes back in other sizes."""


@dataclass(frozen=True, kw_only=True)
class ConditionResult:
    """What one condition showed."""

    condition: Condition
    deviations: list[ShiftDeviation]
    """One for each sequence."""
    consistency: list[list[Consistency]]
    """For each packed row, one for each offset."""

    @cached_property
    def mean(self) -> ShiftDeviation:
        """Over sequences."""
        return ShiftDeviation.mean(self.deviations)


class Probe:
    """One model, or its shape with random weights, under all conditions of the settings."""

    def __init__(
        self, settings: ProbeSettings, load: Callable[[Condition], Llama], sequence_NT: np.ndarray, *, anchor_id: int
    ) -> None:
        """Args: settings; makes the model in a condition's dtype; text as [sequences, tokens]; the anchor token."""
        self.settings, self.load = settings, load
        row_NT, document_T = as_rows(sequence_NT, anchor_id)
        self._sequence_NT, self._row_NT = (self._tensor(each) for each in (sequence_NT, row_NT))
        self._document_T = self._tensor(document_T)
        place_T = np.arange(settings.tokens)
        shifts = (settings.reference_shift, *settings.shifts)
        self._shifted_ST = self._tensor(np.stack([place_T + shift for shift in shifts]))
        in_row = [positions_in_documents(document_T), *(place_T + offset for offset in settings.offsets)]
        self._in_row_ST = self._tensor(np.stack(in_row))
        self.groups: dict[tuple[str, str], list[Condition]] = {}
        random = settings.random_condition()
        for condition in [*settings.conditions(), *([random] if random else [])]:
            self.groups.setdefault((condition.weights, condition.dtype), []).append(condition)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self.settings.device)

    @property
    def passes(self) -> int:
        """Walks through all layers; what progress counts is passes * layers."""
        walks = 0
        for conditions in self.groups.values():
            walks += 1 if self.settings.mode == "shared" else len(conditions)
            walks += len(conditions) if self.settings.offsets else 0
        return walks * self.settings.sequences

    def estimate_seconds(self, model: Llama, condition: Condition) -> float:
        """How long everything takes, from one layer of that model with two of the position sets."""
        layers = model.config.layers

        def seconds(tokens: int) -> float:
            started = time.perf_counter()
            sums = DeviationSums(shifts=1, lengths=[tokens])
            first, position_ST = self._sequence_NT[0, :tokens], self._shifted_ST[:2, :tokens]
            if self.settings.mode == "shared":
                share(model, first, position_ST, {condition.rotation(): sums}, layers=[0])
            else:
                propagate(model, first, position_ST, condition.rotation(), sums=sums, layers=[0])
            return time.perf_counter() - started

        with self._products(condition):
            seconds(min(64, self.settings.tokens))
            one = seconds(self.settings.tokens) / 2 * layers * self.settings.sequences
        conditions = sum(map(len, self.groups.values()))
        sets = len(self._shifted_ST) + (len(self._in_row_ST) if self.settings.offsets else 0)
        return one * conditions * sets

    def run(self, *, on_layer: Callable[[], object], on_estimate: Callable[[float], object]) -> list[ConditionResult]:
        """All conditions' results, in the settings' order.

        Args:
            on_layer: called after each layer of each pass.
            on_estimate: called once, when the first model is loaded, with the seconds that all will take.
        """
        results = {}
        for index, conditions in enumerate(self.groups.values()):
            model = self.load(conditions[0])
            if index == 0:
                on_estimate(self.estimate_seconds(model, conditions[0]))
            with self._products(conditions[0]):
                for result in self._run_model(model, conditions, on_layer):
                    results[result.condition] = result
            del model  # before the next one is loaded
        return [results[condition] for group in self.groups.values() for condition in group]

    def _run_model(
        self, model: Llama, conditions: list[Condition], on_layer: Callable[[], object]
    ) -> list[ConditionResult]:
        deviations: dict[Condition, list[ShiftDeviation]] = {condition: [] for condition in conditions}
        consistency: dict[Condition, list[list[Consistency]]] = {condition: [] for condition in conditions}
        for sequence_T, row_T in zip(self._sequence_NT, self._row_NT, strict=True):
            sums = {condition: self._sums() for condition in conditions}
            if self.settings.mode == "shared":
                rotations = {condition.rotation(): sums[condition] for condition in conditions}
                share(model, sequence_T, self._shifted_ST, rotations, on_layer=on_layer)
            for condition in conditions:
                rotation = condition.rotation()
                if self.settings.mode == "propagated":
                    propagate(model, sequence_T, self._shifted_ST, rotation, sums=sums[condition], on_layer=on_layer)
                deviations[condition].append(sums[condition].result())
                if self.settings.offsets:
                    hidden_STE = propagate(
                        model, row_T, self._in_row_ST, rotation, document_T=self._document_T, on_layer=on_layer
                    )
                    consistency[condition].append(compare_logits(model, hidden_STE))
        return [ConditionResult(condition=c, deviations=deviations[c], consistency=consistency[c]) for c in conditions]

    def _sums(self) -> DeviationSums:
        return DeviationSums(shifts=len(self.settings.shifts), lengths=self.settings.all_lengths())

    def _products(self, condition: Condition) -> AbstractContextManager[object]:
        """Products of bfloat16 matrices as training computes them on this machine."""
        kind = resolve_bfloat16_products(
            "bf16-true" if condition.dtype == "bfloat16" else "32-true",
            device_type=self.settings.device, bfloat16_products="auto",
        )  # fmt: skip
        if kind == "native":
            return nullcontext()
        from modules.float32_products import Float32Products

        return Float32Products()


def check_memory(settings: ProbeSettings, shape: LlamaConfig) -> None:
    """Raises UserError if a probe of that shape would not fit the memory bound."""
    import os

    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    if settings.device == "cuda":
        here = torch.cuda.get_device_properties(0).total_memory / 1e9
    bound = settings.max_memory_gigabytes or here
    needed = memory_bytes(settings, shape, settings.tokens) / 1e9
    if needed <= bound:
        return
    fitting = next((n for n in range(settings.tokens, 7, -8) if memory_bytes(settings, shape, n) / 1e9 <= bound), None)
    remedy = f"--tokens {fitting} would fit" if fitting else "the weights alone do not fit"
    asked = "" if settings.max_memory_gigabytes else " (this machine's memory)"
    raise UserError(
        f"--tokens {settings.tokens}: needs about {needed:.2f} GB of memory, more than --max-memory {bound:.3g}{asked}"
        f"; {remedy}. Fewer --shifts need less too."
    )


def memory_bytes(settings: ProbeSettings, shape: LlamaConfig, tokens: int) -> float:
    """About how much memory a probe takes at its peak: weights, one layer of all position sets, a block of scores."""
    size = max(condition.torch_dtype.itemsize for condition in settings.conditions())
    wide = max(size, 4)
    sets = 1 + len(settings.shifts)
    q_width, kv_width = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    # Hidden states and normed ones; projected q, k, v; turned q and k with the products on the way; what comes out.
    per_token = 2 * shape.width * size + (2 * q_width + 2 * kv_width) * size + 2 * (q_width + kv_width) * wide
    swiglu = 4 * shape.hidden_width * size
    tables = 4 * sets * shape.head_width * wide
    sums = 3 * 8 * len(settings.all_lengths()) * len(settings.shifts) * shape.heads
    block = 5 * max(SCORES_AT_ONCE, shape.heads * tokens) * wide
    used = parameter_count(shape) * size + tokens * (sets * per_token + swiglu + tables + sums) + block
    if settings.offsets:
        used += 5 * 8 * min(tokens, logits_at_once(shape.vocabulary_size)) * shape.vocabulary_size
    return PROCESS_BYTES + ALLOCATOR_SHARE * used
