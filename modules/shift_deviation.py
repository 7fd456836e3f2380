"""How far a rotary embedding is from relative: attention of the same tokens at several places, compared.

Row 0 of the position sets is the reference, the others are compared with it. With a_ij the attention of row i to column
j in one head, s_ij its score before the softmax, T tokens, both counted from 0:

    D           sum over layers, heads, columns j of 1/(T - j) * sum over rows i of |a_ij - a_ij at the reference|
    D_logit     sum over layers, heads of            1/T       * sum over rows i of |s_i0 - s_i0 at the reference|
    row deviation      mean over layers, heads, rows i of sum over columns j of |a_ij - a_ij at the reference|
    first-token share  what column 0 adds to that sum, of all of it

T - j rows can see column j. Attention is causal, so the first n rows are a shorter sequence: one pass gives all
lengths. Scores are q . k / sqrt(D). Scores and softmax are float32, or float64 where q is.

Shape letters: S position sets, without the reference in what is measured; N lengths; L layers; H query heads; G key and
value heads; T tokens; R rows computed at once; C columns that they see; D width of a head; W heads side by side.
Source: arXiv 2411.13476, equations of section 2.3 and Figure 1.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modules.autocast import without_autocast

SCORES_AT_ONCE = 2**19
"""Scores of all heads and some rows that are held together, in a few buffers of 2 MiB: they stay in a core's cache."""


@dataclass(frozen=True, kw_only=True)
class ShiftDeviationConfig:
    """A sample's tokens at two places while a model trains, and how much attention differs."""

    every: int | None = None
    """Steps between two measurements, besides before the first and after the last step. null: none at all."""
    tokens: int = 256
    """Length of the sample, the beginning of the validation documents."""
    shift: int = 1024
    """How far it is moved from position 0."""
    layers: list[int] | None = None
    """Which layers count, from 0. null: all."""

    def broken_rules(self, section: str) -> list[str]:
        """A sentence for every broken rule, each beginning with section.key=value."""
        broken = [
            f"{section}.{name}={getattr(self, name)} must be at least {least}."
            for name, least in (("tokens", 2), ("shift", 1))
            if getattr(self, name) < least
        ]
        if self.every is not None and self.every < 1:
            broken.append(f"{section}.every={self.every} must be at least 1, or null for no measurement.")
        if self.shift + self.tokens > 2**24:
            broken.append(
                f"{section}.shift={self.shift}: positions reach {self.shift + self.tokens - 1}, but float32 holds "
                "whole numbers exactly only up to 16777216. Set a smaller one."
            )
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            broken.append(f"{section}.layers={self.layers} must name layers from 0 on, or be null for all.")
        return broken

    def misfits(self, section: str, *, layers: int) -> list[str]:
        """What does not fit a model of so many layers."""
        if self.every is None or self.layers is None or max(self.layers) < layers:
            return []
        return [f"{section}.layers={self.layers}: the model's layers are 0 to {layers - 1}."]


@dataclass(frozen=True, kw_only=True)
class ShiftDeviation:
    """Deviations of a sequence, or the mean over several, in float64 on the CPU."""

    lengths: tuple[int, ...]
    """Of the prefixes, in tokens, rising; the last is the whole sequence."""
    head_SNLH: Tensor
    """What each head adds to D."""
    row_SNLH: Tensor
    """Each head's row deviation: half of it is the share of attention that moved."""
    first_SNLH: Tensor
    """What column 0 adds to each head's row deviation."""
    logit_SNLH: Tensor
    """What each head adds to D_logit."""
    token_ST: Tensor
    """What each column adds to D of the whole sequence."""

    @property
    def deviation_SN(self) -> Tensor:
        """D."""
        return self.head_SNLH.sum((-1, -2))

    @property
    def logit_deviation_SN(self) -> Tensor:
        """D_logit."""
        return self.logit_SNLH.sum((-1, -2))

    @property
    def row_deviation_SN(self) -> Tensor:
        """Mean over layers, heads and rows; at most 2."""
        return self.row_SNLH.mean((-1, -2))

    @property
    def first_token_share_SN(self) -> Tensor:
        """From 0 to 1; 0 where nothing deviates."""
        return self.first_SNLH.mean((-1, -2)) / self.row_deviation_SN.clamp(min=torch.finfo(torch.float64).tiny)

    @staticmethod
    def mean(each: Sequence["ShiftDeviation"]) -> "ShiftDeviation":
        """Over sequences of one length."""
        names = ("head_SNLH", "row_SNLH", "first_SNLH", "logit_SNLH", "token_ST")
        means = {name: torch.stack([getattr(one, name) for one in each]).mean(0) for name in names}
        return ShiftDeviation(lengths=each[0].lengths, **means)


class DeviationSums:
    """Collects a sequence's deviations layer by layer; holds one layer's sums and the heads' numbers."""

    def __init__(self, *, shifts: int, lengths: Sequence[int]) -> None:
        """Args: position sets besides the reference; lengths in tokens, rising, the last the whole sequence's."""
        self.shifts, self.lengths = shifts, tuple(lengths)
        self._layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._token_ST = torch.zeros(shifts, self.lengths[-1], dtype=torch.float64)

    def start_layer(self, heads: int, device: torch.device) -> None:
        """Before a layer's `add`s."""
        self._column_NSHT = torch.zeros(
            len(self.lengths), self.shifts, heads, self.lengths[-1], dtype=torch.float64, device=device
        )
        self._score_NSH = torch.zeros(len(self.lengths), self.shifts, heads, dtype=torch.float64, device=device)

    def add(self, length_index: int, shift: int, column_HC: Tensor, score_H: Tensor) -> None:
        """Sums over some rows, which lie in that length and in no shorter one."""
        self._column_NSHT[length_index, shift, :, : column_HC.shape[1]] += column_HC
        self._score_NSH[length_index, shift] += score_H

    def end_layer(self) -> None:
        """After a layer's `add`s."""
        column_NSHT, score_NSH = self._column_NSHT.cumsum(0).cpu(), self._score_NSH.cumsum(0).cpu()
        token_NSHT = torch.zeros_like(column_NSHT)
        for n, length in enumerate(self.lengths):
            seen_by_C = torch.arange(length, 0, -1, dtype=torch.float64)
            token_NSHT[n, :, :, :length] = column_NSHT[n, :, :, :length] / seen_by_C
        rows_N11 = torch.tensor(self.lengths, dtype=torch.float64)[:, None, None]
        self._token_ST += token_NSHT[-1].sum(1)
        self._layers.append(
            (token_NSHT.sum(-1), column_NSHT.sum(-1) / rows_N11, column_NSHT[..., 0] / rows_N11, score_NSH / rows_N11)
        )

    def result(self) -> ShiftDeviation:
        """Of all layers so far."""
        head, row, first, logit = (
            torch.stack(part, dim=-2).transpose(0, 1) for part in zip(*self._layers, strict=True)
        )
        return ShiftDeviation(
            lengths=self.lengths, head_SNLH=head, row_SNLH=row, first_SNLH=first, logit_SNLH=logit,
            token_ST=self._token_ST,
        )  # fmt: skip


@torch.no_grad()
def attend_at_positions(
    q_SHTD: Tensor,
    k_SGTD: Tensor,
    v_SGTD: Tensor | None,
    *,
    document_T: Tensor | None = None,
    sums: DeviationSums | None = None,
) -> Tensor | None:
    """Causal attention of every position set, a few rows of all heads at a time, and how it deviates from set 0.

    Args:
        q_SHTD: turned queries, k_SGTD turned keys, in float32, float64 or narrower.
        v_SGTD: values. None: only deviations are wanted.
        document_T: documents that do not see one another. None: one document.
        sums: where the deviations of this layer go.
    Returns:
        [S, T, W] in the dtype of v, or None without values.
    """
    sets, heads, tokens, width = q_SHTD.shape
    groups = k_SGTD.shape[1]
    wide = torch.promote_types(q_SHTD.dtype, torch.float32)
    out_STW = None if v_SGTD is None else v_SGTD.new_empty(sets, tokens, heads * width)
    if sums is not None:
        sums.start_layer(heads, q_SHTD.device)
    with without_autocast(q_SHTD):
        for start, stop, length_index in _row_blocks(heads, sums.lengths if sums else (tokens,)):
            hidden_RC = _hidden(start, stop, document_T, q_SHTD.device)
            first_column = stop - hidden_RC.shape[1]
            reference: tuple[Tensor, Tensor] | None = None
            for index in range(sets):
                q_GMD = q_SHTD[index, :, start:stop].to(wide).mul(width**-0.5).reshape(groups, -1, width)
                score_HRC = (q_GMD @ k_SGTD[index, :, :stop].to(wide).mT).view(heads, stop - start, stop)
                first_HR = score_HRC[..., 0].clone()
                score_HRC[..., first_column:].masked_fill_(hidden_RC, -torch.inf)
                attention_HRC = score_HRC.softmax(-1)
                if v_SGTD is not None and out_STW is not None:
                    v_GCD = v_SGTD[index, :, :stop].to(wide)
                    out_HRD = (attention_HRC.view(groups, -1, stop) @ v_GCD).view(heads, -1, width)
                    out_STW[index, start:stop] = out_HRD.transpose(0, 1).flatten(1).to(out_STW.dtype)
                if reference is None:
                    reference = attention_HRC, first_HR
                elif sums is not None:
                    moved_HC = torch.sub(attention_HRC, reference[0], out=score_HRC).abs_().sum(1)
                    sums.add(length_index, index - 1, moved_HC, (first_HR - reference[1]).abs_().sum(1))
    if sums is not None:
        sums.end_layer()
    return out_STW


def _row_blocks(heads: int, lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, stop, index of the length they lie in), as many rows as keep SCORES_AT_ONCE."""
    start, scores = 0, SCORES_AT_ONCE // heads
    for index, length in enumerate(lengths):
        while start < length:
            rows = (math.isqrt(start**2 + 4 * scores) - start) // 2  # the largest with rows * (start + rows) <= scores
            stop = min(length, start + max(1, rows))
            yield start, stop, index
            start = stop


def _hidden(start: int, stop: int, document_T: Tensor | None, device: torch.device) -> Tensor:
    """Which of the last columns of rows start ... stop - 1 are not seen: of one document, only the rows' own ones."""
    first = start if document_T is None else 0
    row_R1, column_C = torch.arange(start, stop, device=device)[:, None], torch.arange(first, stop, device=device)
    later_RC = column_C > row_R1
    return later_RC if document_T is None else later_RC | (document_T[start:stop, None] != document_T[:stop])
