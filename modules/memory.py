"""What training a model holds in memory, counted from its shape before anything is built.

    weights + gradients + optimizer        from the number of parameters and the precision
    activations                            what autograd keeps of each layer, for each token
    loss                                   one chunk of logits and its gradient

Widths per token and layer, E residual stream, H and G heads of queries and of keys, D their width, F inside the SwiGLU:
5 E + 3 HD + 2 GD + 4 F numbers in the computing dtype, which is what autograd keeps (tests/modules/test_memory.py), and
under a low precision the norms' inputs once more in float32. A kernel's own buffers and the allocator's gaps come on
top: about a tenth.
"""

from dataclasses import dataclass

from modules.llama import LlamaConfig, parameter_count
from modules.loss import default_chunk_tokens

WEIGHT_BYTES = {"64-true": 8, "bf16-true": 2, "16-true": 2}
"""Of the precisions that do not keep weights in float32."""
COMPUTE_BYTES = {**WEIGHT_BYTES, "bf16-mixed": 2, "16-mixed": 2}


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes at the peak of a step, of one device."""

    weights: int
    gradients: int
    optimizer: int
    """AdamW's two moments, and master weights."""
    activations: int
    activations_checkpointed: int
    """The same if only each layer's input were kept and the rest computed again."""
    loss: int

    @property
    def total(self) -> int:
        """All of it, every activation kept."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss


def training_memory(
    config: LlamaConfig, *, tokens: int, precision: str, has_master_weights: bool = False
) -> TrainingMemory:
    """Args: the model's shape; tokens of one forward pass on one device; Lightning's name of the precision."""
    weight, compute = WEIGHT_BYTES.get(precision, 4), COMPUTE_BYTES.get(precision, 4)
    parameters = parameter_count(config)
    state = max(weight, 4) if has_master_weights else weight
    copies = compute * parameters if precision.endswith("mixed") else 0  # autocast keeps its casts
    per_layer = _layer_bytes(config, compute)
    ends = tokens * config.width * (3 * compute + (4 if compute < 4 else 0))  # embedding, last norm
    chunk = min(tokens, default_chunk_tokens(config.vocabulary_size)) * config.vocabulary_size
    return TrainingMemory(
        weights=weight * parameters + copies,
        gradients=weight * parameters,
        optimizer=(2 * state + (4 if has_master_weights else 0)) * parameters,
        activations=config.layers * per_layer * tokens + ends,
        activations_checkpointed=(config.layers * config.width * compute + per_layer) * tokens + ends,
        loss=chunk * (4 + max(compute, 4)) + 4 * config.vocabulary_size * config.width,
    )


def _layer_bytes(c: LlamaConfig, compute: int) -> int:
    """Of one token in one layer."""
    queries, keys = c.heads * c.head_width, c.kv_heads * c.head_width
    numbers = 5 * c.width + 3 * queries + 2 * keys + 4 * c.hidden_width
    in_float32 = 2 + c.heads + (2 * c.width if compute < 4 else 0)  # norms' scales, softmax's sums, norms' inputs
    return compute * numbers + 4 * in_float32
