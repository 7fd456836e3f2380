"""Which blocks of 128 x 128 (query, key) pairs FlexAttention visits: one `BlockMask` per batch and strategy.

A block is left out (no visible pair), full (every pair visible: no rule is evaluated) or partial. The three are told
apart from where the documents begin, in tensor operations on the batch's own device: nothing waits for it.

    anchor, blocks of 2      key      A a | a b | b b        key block   0        1        2
    x visible                query A  x   |     |            query 0     partial
                                   a  x x |     |
                                   a  x x | x   |                  1     partial  partial
                                   b  x   |   x |
                                   b  x   |   x | x                2     partial  partial  partial
                                   b  x   |   x | x x

Shape letters: B rows, T tokens in a row, Q query blocks of a row, K = Q key blocks, N = Q * 128 tokens, T rounded up.
Source: FlexAttention, arXiv 2412.05496.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from modules.attention.borders import Borders
from modules.attention.strategies import Strategy, visible_rule
from modules.batch import PADDING, SHARED_ANCHOR

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""FlexAttention's own default, which its kernels are tuned for."""


def block_mask(borders: Borders, strategy: Strategy) -> BlockMask:
    """The batch's mask under this strategy, made at the first call and shared by all layers.

    It is a few matrices of Q x Q and some vectors of T: 131072 tokens take 40 MB while it is made, and 17 MB after.
    """
    return borders.derived(("flex", strategy.visibility), lambda: _make(borders, strategy))


def classify_blocks(strategy: Strategy, document_BT: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Tell the blocks apart where every document stands in one piece, or the strategy looks over the whole row.

    Args:
        strategy: what a query may see.
        document_BT: as `Borders` holds it: padding only at the end of a row.
        block: tokens on a side, at least 2.
    Returns:
        (partial_BQK, full_BQK), bool. Neither holds where no pair is visible. Padding counts as seeing itself, so
        that no query is without a key.
    """
    rows, tokens = document_BT.shape
    device = document_BT.device
    document_BN = F.pad(document_BT, (0, -tokens % block), value=PADDING)
    real_BQn = (document_BN != PADDING).unflatten(1, (-1, block))
    scope_start_BN = _scope_start(strategy, document_BN)

    # Within its scope a query sees the sink's tokens, and the interval from `since` to itself. Both ends of the
    # interval rise with the query, so all queries of a block together see one interval again, from the first one's
    # `since`, and all of them see what the last one sees before the block.
    since_BN = scope_start_BN
    if strategy.window is not None:
        window_start_N = torch.arange(document_BN.shape[1], device=device) - (strategy.window - 1)
        meets_sink_BN = window_start_N <= scope_start_BN + strategy.sink
        since_BN = torch.where(meets_sink_BN, scope_start_BN, window_start_N)
    since_BQn = since_BN.unflatten(1, (-1, block))
    first_since_BQ1, last_since_BQ1 = since_BQn[..., :1], since_BQn[..., -1:]

    block_K = torch.arange(since_BQn.shape[1], device=device)
    key_start_K, key_stop_K = block_K * block, (block_K + 1) * block
    first_key_BK = key_start_K.expand(rows, -1)
    earlier_QK = block_K < block_K[:, None]
    has_queries_BQ1 = real_BQn[..., :1]

    seen_BQK = (first_since_BQ1 < key_stop_K) & earlier_QK
    if strategy.sink:
        # Sinks of the document that the block's first query stands in; those of later ones lie in the block itself.
        sink_start_BQ1 = scope_start_BN.unflatten(1, (-1, block))[..., :1]
        in_sink_BQK = (key_start_K < sink_start_BQ1 + strategy.sink) & (sink_start_BQ1 < key_stop_K)
        seen_BQK = seen_BQK | (in_sink_BQK & earlier_QK)
    if strategy.anchor:
        anchored_B1 = document_BN[:, :1] == SHARED_ANCHOR
        seen_BQK = seen_BQK | (anchored_B1[..., None] & (block_K == 0) & earlier_QK)
        # The anchor is seen anyway, so a block that starts with it is full where everything after it is seen.
        first_key_BK = first_key_BK + (anchored_B1 & (block_K == 0))

    full_BQK = (last_since_BQ1 <= first_key_BK[:, None]) & earlier_QK & real_BQn[..., -1:]
    partial_BQK = (seen_BQK & has_queries_BQ1 & ~full_BQK) | (block_K == block_K[:, None])
    return partial_BQK, full_BQK


def classify_blocks_by_document(
    strategy: Strategy, document_BT: Tensor, documents: int, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """Tell the blocks apart where documents stand in several pieces: which documents have tokens in both blocks.

    A window or sinks leave out no block here, and make every visible one partial.

    Args:
        strategy: what a query may see; of scope `document`.
        document_BT: as `Borders` holds it.
        documents: the highest document number.
        block: tokens on a side, at least 2.
    Returns:
        As `classify_blocks`.
    """
    document_BN = F.pad(document_BT, (0, -document_BT.shape[1] % block), value=PADDING)
    document_BQn = document_BN.unflatten(1, (-1, block))
    blocks, device = document_BQn.shape[1], document_BT.device
    # Column 0 takes anchors and padding, which are no documents. Counts up to 2 ** 24 are exact in float32.
    holds_BQC = torch.zeros(*document_BQn.shape[:2], documents + 1, device=device)
    holds_BQC.scatter_(2, document_BQn.clamp(min=0).long(), 1.0)
    holds_BQC[..., 0] = 0
    seen_BQK = holds_BQC @ holds_BQC.mT > 0

    block_K = torch.arange(blocks, device=device)
    earlier_QK = block_K < block_K[:, None]
    first_BQ1, first_BK = document_BQn[..., :1], document_BQn[..., 0]
    alone_BQ1 = (document_BQn == first_BQ1).all(-1, keepdim=True) & (first_BQ1 > SHARED_ANCHOR)
    full_BQK = alone_BQ1 & alone_BQ1.mT & (first_BQ1 == first_BK[:, None]) & earlier_QK
    if strategy.window is not None:
        full_BQK = torch.zeros_like(full_BQK)
    if strategy.anchor:
        anchored_B11 = (document_BN[:, :1] == SHARED_ANCHOR)[..., None]
        has_queries_BQ1 = first_BQ1 != PADDING
        seen_BQK = seen_BQK | (anchored_B11 & (block_K == 0) & has_queries_BQ1)
    partial_BQK = (seen_BQK & earlier_QK & ~full_BQK) | (block_K == block_K[:, None])
    return partial_BQK, full_BQK


def _make(borders: Borders, strategy: Strategy) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    # Made in evaluation, perhaps used in training: tensors of `inference_mode` could not be. One integer dtype, so that
    # batches of all kinds share compiled code.
    with torch.inference_mode(False), torch.no_grad():
        document_BT = borders.document_BT.to(torch.int32, copy=True)
        visible = visible_rule(strategy, document_BT)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            # What a softmax over no keys gives is the kernel's business, so padding sees itself.
            return visible(b, h, q, k) | (q == k)

        if borders.order(strategy) is None:
            partial_BQK, full_BQK = classify_blocks(strategy, document_BT)
        else:
            documents = max(run.document for run in borders.runs)
            partial_BQK, full_BQK = classify_blocks_by_document(strategy, document_BT, documents)
        tokens = document_BT.shape[1]
        return BlockMask.from_kv_blocks(
            *_listed(partial_BQK),
            *_listed(full_BQK),
            BLOCK_SIZE=BLOCK,
            mask_mod=mask_mod,
            seq_lengths=(tokens, tokens),
        )


def _scope_start(strategy: Strategy, document_BN: Tensor) -> Tensor:
    """Index of the first token of each token's scope: 0 1 1 1 4 4 for documents 0 1 1 1 2 2."""
    if strategy.scope == "row":
        return torch.zeros_like(document_BN, dtype=torch.int64)
    starts_BN = torch.ones_like(document_BN, dtype=torch.bool)
    starts_BN[:, 1:] = document_BN[:, 1:] != document_BN[:, :-1]
    return (torch.arange(document_BN.shape[1], device=document_BN.device) * starts_BN).cummax(1).values


def _listed(chosen_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen key blocks of each query block, and their indices in front of the others', for one head."""
    count_BQ = chosen_BQK.sum(-1, dtype=torch.int32)
    index_BQK = chosen_BQK.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count_BQ[:, None].contiguous(), index_BQK[:, None].contiguous()
