"""Llama: a decoder of RMSNorm, rotary grouped-query attention and SwiGLU, whose attention strategy is a setting.

    tokens -> embedding -> layers x [ + attention(norm) ; + mlp(norm) ] -> norm -> head

Modules and parameters carry Hugging Face's names (`layers.0.self_attn.q_proj.weight`); only their `model.` in front of
everything but `lm_head` is left out.

Shape letters: B rows, T tokens in a row, H query heads, G key and value heads, D width of a head, W heads
side by side (H * D or G * D), E width, V vocabulary.
Source: Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783; `LlamaForCausalLM` of Hugging Face's transformers.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modules.attention.attend import attend
from modules.attention.borders import Borders
from modules.attention.strategies import Strategy
from modules.autocast import product_dtype, without_autocast
from modules.opaque import opaque
from modules.rotary import RotaryConfig, RotaryPrecision, RotaryTables, apply_rotary, rotary_tables
from modules.rotary_frequencies import Frequencies, frequencies, frequency_digest
from modules.rotary_scaling import NO_SCALING, ScalingConfig

INITIAL_SPREAD = 0.02
"""Standard deviation of every matrix at the start; those that write to the residual stream are narrower."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The complete shape of a model.

    Raises:
        ValueError: a size is below 1, or sizes do not fit one another; all broken rules at once.
    """

    vocabulary_size: int
    width: int
    """E, of the residual stream."""
    layers: int
    heads: int
    """H, of queries."""
    kv_heads: int
    """G, of keys and values: H is multi-head, 1 multi-query, between them grouped-query attention."""
    head_width: int
    """D, even. H * D need not be E."""
    hidden_width: int
    """Inside the SwiGLU."""
    norm_epsilon: float
    tied_embeddings: bool
    """One matrix is both embedding and head."""
    rope_theta: float
    max_positions: int
    """Positions the model is made for."""
    rope_scaling: ScalingConfig = NO_SCALING
    """How the frequencies differ from those of `rope_theta`; complete."""
    attention_bias: bool = False
    """On q, k and v, as Qwen2."""
    attention_output_bias: bool = False
    """On what leaves attention."""
    mlp_bias: bool = False
    """On all three matrices of the SwiGLU."""
    qk_norm: bool = False
    """An RMSNorm over each head of q and k before the rotation, as Qwen3."""

    def __post_init__(self) -> None:
        broken = [
            f"{f.name}={value!r} must be at least 1."
            for f in fields(self)
            if f.type is int and (value := getattr(self, f.name)) < 1
        ]
        for name in ("norm_epsilon", "rope_theta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                broken.append(f"{name}={value!r} must be a finite number above 0.")
        if not broken and self.heads % self.kv_heads:
            broken.append(
                f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}: "
                "set kv_heads to a divisor of heads, so that each serves equally many queries."
            )
        if self.head_width % 2:
            broken.append(f"head_width={self.head_width} must be even: the rotary embedding turns pairs.")
        scaling = self.rope_scaling.broken_rules("rope_scaling", complete=True)
        if not broken and not scaling:
            scaling = self.rope_scaling.misfits("rope_scaling", head_width=self.head_width, theta=self.rope_theta)
        broken += scaling
        if broken:
            raise ValueError("\n".join(broken))


class Llama(nn.Module):
    """The decoder, from tokens to hidden states; `logits` or a chunked loss takes it from there."""

    def __init__(self, config: LlamaConfig, *, strategy: Strategy, kernel: str, rotary: RotaryConfig) -> None:
        """Builds on the current default device, the meta device included, with fresh weights.

        Args:
            config: the shape.
            strategy: which keys each query may see.
            kernel: name of what computes the attention: speed, not result.
            rotary: theta and scaling (None: the shape's own) and where the rotation rounds.
        Raises:
            ValueError: a scaling that does not fit the shape.
        """
        super().__init__()
        self.config, self.strategy, self.rotary = config, strategy, rotary
        self.theta = config.rope_theta if rotary.theta is None else rotary.theta
        self.scaling = rotary.scaling.completed(config.rope_scaling, max_positions=config.max_positions)
        if misfits := self.scaling.misfits(head_width=config.head_width, theta=self.theta):
            raise ValueError("\n".join(misfits))
        self.embed_tokens = Embedding(config.vocabulary_size, config.width)
        self.layers = nn.ModuleList(
            Layer(config, strategy=strategy, kernel=kernel, rotary=rotary) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.lm_head = None if config.tied_embeddings else Projection(config.width, config.vocabulary_size, bias=False)

    @property
    def head_weight_VE(self) -> Tensor:
        """The matrix from hidden states to logits, also where it is the embedding."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens_BT: Tensor, position_BT: Tensor, borders: Borders) -> Tensor:
        """Hidden states after the last norm, [B, T, E].

        Args:
            tokens_BT: int64 token ids.
            position_BT: int64 positions for the rotary embedding.
            borders: where documents begin and end in these rows.
        """
        hidden_BTE = self.embed_tokens(tokens_BT)
        tables = _tables(position_BT, hidden_BTE, self.rotary, self.config.head_width, self.theta, self.scaling)
        for layer in self.layers:
            hidden_BTE = layer(hidden_BTE, tables, borders)
        return self.norm(hidden_BTE)

    def logits(self, hidden_BTE: Tensor) -> Tensor:
        """Scores of every next token, [B, T, V], all at once: for tests and short rows."""
        return F.linear(hidden_BTE, self.head_weight_VE)

    def rotary_tables(
        self, position_BT: Tensor, compute_dtype: torch.dtype, precision: RotaryPrecision | None = None
    ) -> RotaryTables:
        """The tables that `forward` uses for these positions.

        Args:
            position_BT: integer positions.
            compute_dtype: dtype of q and k as they leave their projections.
            precision: where the rotation rounds. None: the model's own policy.
        """
        rotary = self.rotary if precision is None else replace(self.rotary, precision=precision)
        return rotary_tables(
            position_BT, config=rotary, head_width=self.config.head_width, theta=self.theta,
            compute_dtype=compute_dtype, scaling=self.scaling,
        )  # fmt: skip

    def frequencies(self, length: int | None = None, dtype: torch.dtype = torch.float32) -> Frequencies:
        """The rotary frequencies for sequences of that length (None: at most the original one)."""
        return frequencies(
            head_width=self.config.head_width, theta=self.theta, scaling=self.scaling, length=length, dtype=dtype
        )

    def frequency_digest(self) -> str:
        """Identity of the rotary frequencies: those of short sequences and of the longest."""
        return frequency_digest(self.frequencies(), self.frequencies(self.config.max_positions))

    def reset_parameters(self) -> None:
        """Draws every parameter anew, as after `to_empty` of a model built on the meta device."""
        for module in self.modules():
            if module is not self and callable(reset := getattr(module, "reset_parameters", None)):
                reset()


class Layer(nn.Module):
    """Attention and SwiGLU, each on the normed residual stream and added back to it."""

    def __init__(self, config: LlamaConfig, *, strategy: Strategy, kernel: str, rotary: RotaryConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.self_attn = Attention(config, strategy=strategy, kernel=kernel, rotary=rotary)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.mlp = SwiGLU(config)

    def forward(self, hidden_BTE: Tensor, tables: RotaryTables, borders: Borders) -> Tensor:
        hidden_BTE = hidden_BTE + self.self_attn(self.input_layernorm(hidden_BTE), tables, borders)
        return hidden_BTE + self.mlp(self.post_attention_layernorm(hidden_BTE))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, *, strategy: Strategy, kernel: str, rotary: RotaryConfig) -> None:
        super().__init__()
        self.strategy, self.kernel, self.precision = strategy, kernel, rotary.precision
        self.head_width = config.head_width
        q_width, kv_width = config.heads * config.head_width, config.kv_heads * config.head_width
        self.q_proj = Projection(config.width, q_width, bias=config.attention_bias)
        self.k_proj = Projection(config.width, kv_width, bias=config.attention_bias)
        self.v_proj = Projection(config.width, kv_width, bias=config.attention_bias)
        spread = _residual_spread(config)
        self.o_proj = Projection(q_width, config.width, spread=spread, bias=config.attention_output_bias)
        self.q_norm = HeadNorm(config.head_width, eps=config.norm_epsilon) if config.qk_norm else None
        self.k_norm = HeadNorm(config.head_width, eps=config.norm_epsilon) if config.qk_norm else None

    def projected(self, hidden_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(q_BTW, k_BTW, v_BTW) of the normed residual stream, biased and normed, not yet rotated."""
        q_BTW, k_BTW, v_BTW = (project(hidden_BTE) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTW, k_BTW = self.q_norm(q_BTW), self.k_norm(k_BTW)
        return q_BTW, k_BTW, v_BTW

    def forward(self, hidden_BTE: Tensor, tables: RotaryTables, borders: Borders) -> Tensor:
        q_BTW, k_BTW, v_BTW = self.projected(hidden_BTE)
        # Compiled code drops roundings between operations that it fuses, and keeps the one at the end.
        rotate = _rotate if self.precision in ("float32_scores", "float32") else _rotate_in_python
        q_BHTD, k_BGTD = rotate(q_BTW, k_BTW, tables, self.precision, self.head_width)
        return self.o_proj(_attend(q_BHTD, k_BGTD, v_BTW, borders, self.strategy, self.kernel))


@opaque
def _tables(
    position_BT: Tensor,
    hidden_BTE: Tensor,
    rotary: RotaryConfig,
    head_width: int,
    theta: float,
    scaling: ScalingConfig = NO_SCALING,
) -> RotaryTables:
    """The tables for what the projections make of these hidden states."""
    dtype = product_dtype(hidden_BTE)
    return rotary_tables(
        position_BT, config=rotary, head_width=head_width, theta=theta, compute_dtype=dtype, scaling=scaling
    )


def _rotate(
    q_BTW: Tensor, k_BTW: Tensor, tables: RotaryTables, precision: RotaryPrecision, head_width: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys by head, turned."""
    return apply_rotary(_by_head(q_BTW, head_width), _by_head(k_BTW, head_width), tables, precision)


_rotate_in_python = opaque(_rotate)


@opaque
def _attend(q_BHTD: Tensor, k_BGTD: Tensor, v_BTW: Tensor, borders: Borders, strategy: Strategy, kernel: str) -> Tensor:
    """Attention from the values as projected to the output as projected next, in their dtype.

    What leaves a compiled graph here and enters the next has one memory layout, whatever the documents.
    """
    v_BGTD = _by_head(v_BTW, q_BHTD.shape[-1]).to(q_BHTD.dtype)
    # Attention computes in the dtype that the policy hands over; autocast would undo a wide one inside the kernel.
    with without_autocast(q_BHTD):
        out_BHTD = attend(q_BHTD, k_BGTD, v_BGTD, borders, strategy, kernel=kernel)
    return out_BHTD.to(v_BTW.dtype).transpose(1, 2).flatten(2)


def _by_head(x_BTW: Tensor, head_width: int) -> Tensor:
    return x_BTW.unflatten(-1, (-1, head_width)).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)). Source: arXiv 2002.05202."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        bias, spread = config.mlp_bias, _residual_spread(config)
        self.gate_proj = Projection(config.width, config.hidden_width, bias=bias)
        self.up_proj = Projection(config.width, config.hidden_width, bias=bias)
        self.down_proj = Projection(config.hidden_width, config.width, spread=spread, bias=bias)

    def forward(self, hidden_BTE: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_BTE)) * self.up_proj(hidden_BTE))


class Projection(nn.Linear):
    """A matrix that starts normal, with a spread of its own, and a bias of zeros where there is one."""

    def __init__(self, inputs: int, outputs: int, *, spread: float = INITIAL_SPREAD, bias: bool = False) -> None:
        self.spread = spread  # first, since nn.Linear's constructor calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        _draw_normal(self.weight, self.spread)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of each head by itself, over heads side by side, in the dtype that they come in.

    Under autocast the heads are low and the weights float32: the norm is wide then and rounded once.
    """

    def forward(self, x_BTW: Tensor) -> Tensor:
        heads_BTHD = x_BTW.unflatten(-1, (-1, self.normalized_shape[0]))
        return super().forward(heads_BTHD.to(self.weight.dtype)).to(x_BTW.dtype).flatten(-2)


class Embedding(nn.Embedding):
    """A row per token that starts normal."""

    def reset_parameters(self) -> None:
        _draw_normal(self.weight, INITIAL_SPREAD)


def parameter_count(config: LlamaConfig) -> int:
    """Parameters of the model, a tied matrix once, without building it."""
    c = config
    embeddings = (1 if c.tied_embeddings else 2) * c.vocabulary_size * c.width
    vectors = 2 * c.width  # norms, then biases
    vectors += 2 * c.head_width if c.qk_norm else 0
    vectors += c.head_width * (c.heads + 2 * c.kv_heads) if c.attention_bias else 0
    vectors += c.width if c.attention_output_bias else 0
    vectors += 2 * c.hidden_width + c.width if c.mlp_bias else 0
    return embeddings + c.width + c.layers * (vectors + layer_matrix_parameters(c))


def layer_matrix_parameters(config: LlamaConfig) -> int:
    """Elements of one layer's matrices, biases not among them: what each token is multiplied with."""
    c = config
    attention = 2 * c.width * c.head_width * (c.heads + c.kv_heads)
    return attention + 3 * c.width * c.hidden_width


def _residual_spread(config: LlamaConfig) -> float:
    """Keeps the residual stream's variance from growing with depth: 2 * layers matrices add to it (GPT-2)."""
    return INITIAL_SPREAD / math.sqrt(2 * config.layers)


@torch.no_grad()
def _draw_normal(weight: Tensor, spread: float) -> None:
    """Drawn in float32 whatever the weight's dtype: one seed gives the same weights, rounded, in every dtype."""
    weight.copy_(torch.empty_like(weight, dtype=torch.float32).normal_(std=spread))
