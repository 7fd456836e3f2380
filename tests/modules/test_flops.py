"""FLOPs by hand, and as torch counts another model of the same shape."""

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from modules.flops import forward_flops, training_flops
from modules.llama import LlamaConfig

SHAPE = LlamaConfig(
    vocabulary_size=50, width=12, layers=3, heads=4, kv_heads=2, head_width=6, hidden_width=20,
    norm_epsilon=1e-5, tied_embeddings=False, rope_theta=1e4, max_positions=64,
)  # fmt: skip


def test_by_hand() -> None:
    """Row of 8: the anchor and documents of 3 and 4 tokens, of which 24 pairs see each other.

    A layer: q and o 12 * 24 each, k and v 12 * 12 each, three of 12 * 20: 1584 elements. Head: 50 * 12 = 600.
    Products with matrices: 2 * (3 * 1584 + 600) * 8 tokens = 85 632.
    Scores and weighted values: 3 layers * 4 heads * 24 pairs * (2 * 6 + 2 * 6) = 6 912.
    """
    assert forward_flops(SHAPE, tokens=8, visible_pairs=24) == 85_632 + 6_912
    assert training_flops(SHAPE, tokens=8, visible_pairs=24) == 3 * (85_632 + 6_912)


def test_as_torch_counts_hugging_faces_dense_attention() -> None:
    """Their eager attention computes all pairs, those above the diagonal too, so here all T * T count as visible."""
    rows, tokens = 2, 16
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=6, attn_implementation="eager",
        )
    )  # fmt: skip
    with FlopCounterMode(display=False) as forward:
        loss = theirs(torch.randint(50, (rows, tokens)), use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    counted = {"tokens": rows * tokens, "visible_pairs": rows * tokens**2}
    assert forward.get_total_flops() == forward_flops(SHAPE, **counted)
    assert forward.get_total_flops() + backward.get_total_flops() == training_flops(SHAPE, **counted)
