"""Other libraries' Llamas with our weights, for the same training step on the same rows.

Each function takes our model and a batch of one row and returns their model and what computes its loss. The packages
load where they are used.

Shape letters: B rows, T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from modules.attention.strategies import visible_rule
from modules.batch import NO_TARGET
from workbench.errors import UserError

if TYPE_CHECKING:
    from modules.batch import PackedBatch
    from modules.llama import Llama

Peer = tuple[nn.Module, Callable[[], Tensor]]


def transformers(ours: Llama, batch: PackedBatch) -> Peer:
    """Hugging Face's: plain causal attention for `full`, an explicit 4-D mask for every other strategy."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise UserError("--peer transformers: the package is not installed: pip install transformers.") from error
    c = ours.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocabulary_size, hidden_size=c.width, intermediate_size=c.hidden_width,
            num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
            head_dim=c.head_width, rms_norm_eps=c.norm_epsilon, tie_word_embeddings=c.tied_embeddings,
            max_position_embeddings=c.max_positions, attn_implementation="sdpa",  # type: ignore[call-arg]
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        )
    )  # fmt: skip
    weights = ours.state_dict()
    model.load_state_dict({name if name.startswith("lm_head") else f"model.{name}": weights[name] for name in weights})
    mask_11TT = None
    if ours.strategy.name != "full":
        index = torch.arange(batch.tokens_BT.shape[1])
        rule = visible_rule(ours.strategy, batch.document_BT)
        mask_11TT = rule(torch.tensor(0), torch.tensor(0), index[:, None], index)[None, None]
    # Ours stand beside the token that predicts them; theirs are shifted by the model.
    labels_BT = torch.cat((torch.full((1, 1), NO_TARGET), batch.labels_BT[:, :-1]), dim=1)

    def loss() -> Tensor:
        out = model(
            batch.tokens_BT,
            attention_mask=mask_11TT,
            position_ids=batch.position_BT,
            labels=labels_BT,
            use_cache=False,
        )
        return out.loss

    return model, loss


def litgpt(ours: Llama, batch: PackedBatch) -> Peer:
    """LitGPT's, which has no documents: full causal attention alone.

    Source of the names: litgpt/scripts/convert_hf_checkpoint.py, copy_weights_hf_llama.
    """
    try:
        from litgpt.config import Config
        from litgpt.model import GPT
        from litgpt.utils import chunked_cross_entropy
    except ImportError as error:
        # With its dependencies pip would put huggingface-hub back to a version that transformers 5 refuses.
        raise UserError("--peer litgpt: the package is not installed: pip install --no-deps litgpt psutil.") from error
    c = ours.config
    model = GPT(
        Config(
            block_size=batch.tokens_BT.shape[1], n_layer=c.layers, n_embd=c.width, vocab_size=c.vocabulary_size,
            padded_vocab_size=c.vocabulary_size, n_head=c.heads, head_size=c.head_width, n_query_groups=c.kv_heads,
            intermediate_size=c.hidden_width, norm_class_name="RMSNorm", norm_eps=c.norm_epsilon,
            mlp_class_name="LLaMAMLP", bias=False, parallel_residual=False, rotary_percentage=1.0,
            rope_base=int(c.rope_theta),
        )
    )  # fmt: skip
    model.load_state_dict(_litgpt_weights(ours))
    return model, lambda: chunked_cross_entropy(model(batch.tokens_BT), batch.labels_BT)


def _litgpt_weights(ours: Llama) -> dict[str, Tensor]:
    """Ours under LitGPT's names; queries, keys and values in one matrix, one after the other."""
    within_layer = {
        "input_layernorm": "norm_1",
        "self_attn.o_proj": "attn.proj",
        "post_attention_layernorm": "norm_2",
        "mlp.gate_proj": "mlp.fc_1",
        "mlp.up_proj": "mlp.fc_2",
        "mlp.down_proj": "mlp.proj",
    }
    weights = ours.state_dict()
    theirs = {
        "transformer.wte.weight": weights["embed_tokens.weight"],
        "transformer.ln_f.weight": weights["norm.weight"],
        "lm_head.weight": ours.head_weight_VE,
    }
    for layer in range(ours.config.layers):
        here, there = f"layers.{layer}", f"transformer.h.{layer}"
        theirs[f"{there}.attn.qkv.weight"] = torch.cat(
            [weights[f"{here}.self_attn.{letter}_proj.weight"] for letter in "qkv"]
        )
        theirs |= {f"{there}.{name}.weight": weights[f"{here}.{own}.weight"] for own, name in within_layer.items()}
    return theirs


PEERS = {"transformers": transformers, "litgpt": litgpt}
FULL_ONLY = ("litgpt",)
"""Peers that compute no other strategy than `full`."""
