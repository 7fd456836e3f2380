"""The same tokens at several positions through one model, layer by layer; where RoPE rounds is a choice.

    propagated   every position set runs its own forward pass: what a training or an evaluation meets
    shared       q and k of one float32 forward pass, turned by every set: the rotation alone

One layer's hidden states of all sets and a few rows of its scores are in memory, never a whole model's.

Shape letters: S position sets, the first of them the reference; T tokens; E width; H query heads; G key and value
heads; D width of a head; W heads side by side.
Source: arXiv 2411.13476, section 2.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modules.attention.borders import Borders
from modules.autocast import product_dtype
from modules.llama import Layer, Llama
from modules.number_formats import NumberFormat
from modules.rotary import RotaryPrecision, RotaryTables, apply_rotary
from modules.shift_deviation import DeviationSums, attend_at_positions


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """How queries and keys are turned."""

    precision: RotaryPrecision = "float32"
    dtype: torch.dtype | None = None
    """q and k are cast to it before they are turned; it is the policy's compute dtype. None: the activations'."""
    tables_format: NumberFormat | None = None
    """Cosine and sine are rounded to it, besides what the policy rounds."""
    rotated_format: NumberFormat | None = None
    """Turned q and k are rounded to it, besides what the policy rounds."""

    def tables(self, model: Llama, position_ST: Tensor, activations: torch.dtype) -> RotaryTables:
        """Made for all position sets at once: a scaling that depends on the length takes one for all of them."""
        tables = model.rotary_tables(position_ST, self.dtype or activations, self.precision)
        if self.tables_format is None:
            return tables
        return RotaryTables(*(self.tables_format.round(table) for table in tables))

    def turn(self, q_SHTD: Tensor, k_SGTD: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
        """Queries and keys at their positions."""
        dtype = self.dtype or q_SHTD.dtype
        q_SHTD, k_SGTD = apply_rotary(q_SHTD.to(dtype), k_SGTD.to(dtype), tables, self.precision)
        if self.rotated_format is None:
            return q_SHTD, k_SGTD
        return self.rotated_format.round(q_SHTD), self.rotated_format.round(k_SGTD)


@torch.no_grad()
def propagate(
    model: Llama,
    tokens_T: Tensor,
    position_ST: Tensor,
    rotation: Rotation,
    *,
    document_T: Tensor | None = None,
    sums: DeviationSums | None = None,
    layers: Collection[int] | None = None,
    on_layer: Callable[[], object] | None = None,
) -> Tensor:
    """Hidden states after the last norm, [S, T, E], each position set's own; attention is causal.

    Args:
        model: in the dtype that activations shall have; its own rotary policy and strategy are not asked.
        tokens_T: int64 token ids.
        position_ST: int64 positions, the reference first.
        rotation: how queries and keys are turned.
        document_T: documents that do not see one another. None: one document.
        sums: where deviations from the reference go.
        layers: which layers' deviations to take; nothing runs after the last of them. None: all.
        on_layer: called after each layer.
    """
    hidden_STE = model.embed_tokens(tokens_T).expand(len(position_ST), -1, -1).clone()
    tables = rotation.tables(model, position_ST, product_dtype(hidden_STE))
    for index, layer in enumerate(_layers(model, layers)):
        q_SHTD, k_SGTD, v_SGTD = _projected(layer, hidden_STE)
        q_SHTD, k_SGTD = rotation.turn(q_SHTD, k_SGTD, tables)
        of_layer = sums if layers is None or index in layers else None
        out_STW = attend_at_positions(q_SHTD, k_SGTD, v_SGTD, document_T=document_T, sums=of_layer)
        hidden_STE += layer.self_attn.o_proj(out_STW)
        for hidden_TE in hidden_STE:  # one at a time: the SwiGLU's inside is several times as wide
            hidden_TE += layer.mlp(layer.post_attention_layernorm(hidden_TE))
        if on_layer is not None:
            on_layer()
    return model.norm(hidden_STE)


@torch.no_grad()
def share(
    model: Llama,
    tokens_T: Tensor,
    position_ST: Tensor,
    rotations: Mapping[Rotation, DeviationSums],
    *,
    layers: Collection[int] | None = None,
    on_layer: Callable[[], object] | None = None,
) -> None:
    """Fills the deviations of several rotations from one forward pass at the reference positions.

    Args:
        model: in float32, its own rotary policy float32, for the forward pass.
        tokens_T: int64 token ids.
        position_ST: int64 positions, the reference first.
        rotations: how queries and keys are turned, each with a dtype, and where its deviations go.
        layers: which layers' deviations to take; nothing runs after the last of them. None: all.
        on_layer: called after each layer.
    """
    hidden_BTE = model.embed_tokens(tokens_T[None])
    tables = {rotation: rotation.tables(model, position_ST, hidden_BTE.dtype) for rotation in rotations}
    forward_tables = RotaryTables(*(x[:1] for x in model.rotary_tables(position_ST, hidden_BTE.dtype)))
    borders = Borders.of(torch.ones_like(tokens_T[None]))
    for index, layer in enumerate(_layers(model, layers)):
        q_BHTD, k_BGTD, _ = _projected(layer, hidden_BTE)
        for rotation, sums in rotations.items() if layers is None or index in layers else ():
            sets = len(position_ST)
            q_SHTD, k_SGTD = (x.expand(sets, -1, -1, -1) for x in (q_BHTD, k_BGTD))
            attend_at_positions(*rotation.turn(q_SHTD, k_SGTD, tables[rotation]), None, sums=sums)
        hidden_BTE = layer(hidden_BTE, forward_tables, borders)
        if on_layer is not None:
            on_layer()


def _layers(model: Llama, chosen: Collection[int] | None) -> Iterator[Layer]:
    """From the first to the last one chosen."""
    for layer in model.layers[: None if chosen is None else max(chosen) + 1]:
        assert isinstance(layer, Layer)
        yield layer


def _projected(layer: Layer, hidden_STE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q_SHTD, k_SGTD and v_SGTD, not turned yet."""
    width = layer.self_attn.head_width
    projected = layer.self_attn.projected(layer.input_layernorm(hidden_STE))
    q_SHTD, k_SGTD, v_SGTD = (x_STW.unflatten(-1, (-1, width)).transpose(1, 2) for x_STW in projected)
    return q_SHTD, k_SGTD, v_SGTD
