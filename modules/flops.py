"""Floating-point operations of a model, from its shape and from how many keys its queries see.

A product of [m, k] and [k, n] is 2 * m * k * n operations. Only matrix products count: norms, rotation, softmax and the
embedding's look-up do not, and neither does what a kernel computes for pairs that nobody may see.

    forward  = 2 * matrix parameters * tokens  +  4 * heads * head width * visible pairs * layers
    training = 3 * forward                        (backward: one product for each operand's gradient)

Matrix parameters are all layers' and the head's, a tied one too. 4 = 2 products (scores, weighted values) * 2. Keys and
values shared by several heads change nothing, since every query head multiplies them.
Source: PaLM, arXiv 2204.02311, appendix B, with visible pairs where it has T * T.
"""

from modules.llama import LlamaConfig, layer_matrix_parameters


def forward_flops(config: LlamaConfig, *, tokens: int, visible_pairs: int) -> int:
    """Operations of one forward pass, logits of every position included.

    Args:
        config: the model's shape.
        tokens: positions in all rows, anchors and padding included.
        visible_pairs: (query, key) pairs in all rows that the strategy lets see each other.
    """
    matrices = config.layers * layer_matrix_parameters(config) + config.vocabulary_size * config.width
    attention = 4 * config.heads * config.head_width * visible_pairs * config.layers
    return 2 * matrices * tokens + attention


def training_flops(config: LlamaConfig, *, tokens: int, visible_pairs: int) -> int:
    """Operations of forward and backward together; arguments as in `forward_flops`. Recomputation is not counted."""
    return 3 * forward_flops(config, tokens=tokens, visible_pairs=visible_pairs)
