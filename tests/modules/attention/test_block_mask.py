"""The blocks that FlexAttention visits, without FlexAttention: each block against the pairs it stands for."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.profiler import ProfilerActivity, profile

from modules.attention.block_mask import BLOCK, block_mask, classify_blocks, classify_blocks_by_document
from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES, Strategy
from tests.oracles.dense_attention import dense_attention


@st.composite
def cases(draw):
    """A strategy of any fields, two rows of documents with and without the shared anchor and padding, a block size.

    Blocks are small, so that documents, windows and sinks often end at a block's border or beside it.
    """
    block = draw(st.integers(2, 5))
    tokens = draw(st.integers(2, 6 * block))
    scope = draw(st.sampled_from(["row", "document"]))
    window = draw(st.none() | st.integers(1, tokens))
    strategy = Strategy(
        name="drawn",
        scope=scope,
        anchor=scope == "document" and draw(st.booleans()),
        window=window,
        sink=0 if window is None else draw(st.integers(0, tokens)),
        default_positions="continuous",
        default_anchor="none",
    )
    rows = []
    for _ in range(2):
        starts = draw(st.lists(st.integers(1, tokens), max_size=4))
        padding = draw(st.just(0) | st.integers(0, tokens))
        anchored = draw(st.booleans())
        number = np.searchsorted(np.unique([*starts, 1] if anchored else starts), np.arange(tokens), side="right")
        number += 0 if anchored else 1
        number[tokens - padding :] = -1
        rows.append(number.tolist())
    return strategy, rows, block


def visible_pairs(strategy, document):
    """Bool [T, T], one query after the other: the keys of its scope as a list, cut to both ends of it."""
    visible = np.zeros((len(document), len(document)), dtype=bool)
    scopes = {}
    for query, number in enumerate(document):
        if number == -1:
            continue
        scope = scopes.setdefault(number if strategy.scope == "document" else "row", [])
        scope.append(query)
        visible[query, scope if strategy.window is None else scope[-strategy.window :] + scope[: strategy.sink]] = True
        visible[query, 0] |= strategy.anchor and document[0] == 0
    return visible


def visible_blocks(strategy, documents, block):
    """[B, Q, K, block, block], pairs past the end of the row left out."""
    size = -(-len(documents[0]) // block)
    padding = size * block - len(documents[0])
    pairs = np.stack([np.pad(visible_pairs(strategy, document), (0, padding)) for document in documents])
    return torch.from_numpy(pairs).reshape(-1, size, block, size, block).transpose(2, 3)


@settings(max_examples=1000, deadline=None)
@given(cases())
def test_blocks_are_none_partial_or_full_as_their_pairs_are(case):
    strategy, documents, block = case
    Borders.of(torch.tensor(documents))  # they are rows as the package admits them
    partial, full = classify_blocks(strategy, torch.tensor(documents), block)
    visible = visible_blocks(strategy, documents, block)
    some, every = visible.any(-1).any(-1), visible.all(-1).all(-1)
    diagonal = torch.eye(some.shape[-1], dtype=torch.bool)

    assert not (partial & full).any()
    assert not (some & ~(partial | full)).any()
    assert not (full & ~every).any()
    # Blocks on the diagonal may hold padding alone; no other is visited in vain.
    assert torch.equal((partial | full) & ~diagonal, some & ~diagonal)
    # Blocks that lie inside a sink, and beside the window, are the ones that are full without being listed so.
    assert strategy.sink >= block - 1 or torch.equal(full, every)


@settings(max_examples=500, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_blocks_of_interleaved_documents_are_none_partial_or_full(case, random):
    strategy, documents, block = case
    strategy = replace(strategy, scope="document")
    for row in documents:
        first, end = int(row[0] == 0), row.index(-1) if -1 in row else len(row)
        inner = row[first:end]
        random.shuffle(inner)
        row[first:end] = inner
    Borders.of(torch.tensor(documents))
    most = max(max(row) for row in documents)
    partial, full = classify_blocks_by_document(strategy, torch.tensor(documents), max(most, 0), block)
    visible = visible_blocks(strategy, documents, block)
    some, every = visible.any(-1).any(-1), visible.all(-1).all(-1)
    diagonal = torch.eye(some.shape[-1], dtype=torch.bool)

    assert not (partial & full).any()
    assert not (some & ~(partial | full)).any()
    assert not (full & ~every).any()
    if strategy.window is None:
        # Blocks on the diagonal may hold padding alone; no other is visited in vain.
        assert torch.equal((partial | full) & ~diagonal, some & ~diagonal)
        first_block_is_seen = torch.arange(some.shape[-1]) == 0
        # Only a block that holds the anchor beside one document is full without being listed so.
        assert torch.equal(full & ~first_block_is_seen, every & ~first_block_is_seen)


def consume(q_BHTD, k_BGTD, v_BGTD, mask):
    """What FlexAttention does with a mask, block by block: full blocks ask no rule, blocks not listed do not exist."""
    rows, heads, tokens, _ = q_BHTD.shape
    size = mask.kv_indices.shape[-1]
    index = torch.arange(tokens)
    share = heads // k_BGTD.shape[1]
    k_BHTD, v_BHTD = (x.repeat_interleave(share, dim=1) for x in (k_BGTD, v_BGTD))
    outs = []
    for row in range(rows):
        visible_TT = torch.zeros(size * BLOCK, size * BLOCK, dtype=torch.bool)
        rule_TT = mask.mask_mod(torch.tensor(row), torch.tensor(0), index[:, None], index[None, :])
        for query_block in range(size):
            queries = slice(query_block * BLOCK, min((query_block + 1) * BLOCK, tokens))
            listed = [
                *((j, False) for j in mask.kv_indices[row, 0, query_block][: mask.kv_num_blocks[row, 0, query_block]]),
                *(
                    (j, True)
                    for j in mask.full_kv_indices[row, 0, query_block][: mask.full_kv_num_blocks[row, 0, query_block]]
                ),
            ]
            for key_block, full in listed:
                keys = slice(int(key_block) * BLOCK, min((int(key_block) + 1) * BLOCK, tokens))
                visible_TT[queries, keys] = True if full else rule_TT[queries, keys]
        score_HTT = q_BHTD[row] @ k_BHTD[row].mT / q_BHTD.shape[-1] ** 0.5
        score_HTT = score_HTT.masked_fill(~visible_TT[:tokens, :tokens], -torch.inf)
        outs.append(score_HTT.softmax(-1) @ v_BHTD[row])
    return torch.stack(outs)


@pytest.mark.parametrize("interleaved", [False, True], ids=["whole", "interleaved"])
@pytest.mark.parametrize("anchor", [False, True], ids=["copies", "shared"])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("tokens", [137, 1025])
def test_consumed_as_documented_the_mask_gives_dense_attention(tokens, name, anchor, interleaved):
    """Float64, gradients included; padding is left out here, which the kernel zeroes."""
    strategy = STRATEGIES[name]
    if strategy.window is not None:
        strategy = replace(strategy, window=150, sink=130 if strategy.sink else 0)
    first = [0] if anchor else [1]
    documents = [
        (first + [1] * 50 + [2] * (tokens - 60) + [3] * 40)[:tokens],
        (first + [1] * (tokens - 30) + [-1] * 40)[:tokens],
    ]
    if interleaved:
        documents[0] = (first + ([1] * 30 + [2] * 20 + [3] * 45) * tokens)[:tokens]
    generator = torch.Generator().manual_seed(tokens)
    inputs = [
        torch.randn(2, heads, tokens, 4, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (2, 1, 1)
    ]
    weight = torch.randn(2, 2, tokens, 4, dtype=torch.float64, generator=generator)
    document_BT = torch.tensor(documents)
    weight = weight.masked_fill((document_BT == -1)[:, None, :, None], 0.0)

    expected = dense_attention(*inputs, name, documents, window=strategy.window or 0, sink=strategy.sink)
    out = consume(*inputs, block_mask(Borders.of(document_BT), strategy))

    torch.testing.assert_close(out * (weight != 0), expected * (weight != 0), rtol=0, atol=1e-12)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)
    for gradient, wanted in zip(gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-11)


def test_the_mask_as_drawn():
    """A document of 200 tokens behind the anchor, one of 400, padding from 601 on: 6 blocks."""
    document_BT = torch.tensor([[0] + [1] * 200 + [2] * 400 + [-1] * 60])
    mask = block_mask(Borders.of(document_BT), STRATEGIES["anchor"])

    def listed(count, index):
        return [sorted(row[:n].tolist()) for n, row in zip(count[0, 0], index[0, 0], strict=True)]

    assert listed(mask.kv_num_blocks, mask.kv_indices) == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 1, 2, 3, 4],
        [5],
    ]
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices) == [[], [], [], [2], [], []]
    assert mask.seq_lengths == (661, 661)
    assert mask.BLOCK_SIZE == (BLOCK, BLOCK)
    for tensor in (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def test_a_mask_is_made_once_per_batch_and_strategy():
    document_BT = torch.tensor([[0, 1, 1, 2, 2]])
    borders = Borders.of(document_BT)
    mask = block_mask(borders, STRATEGIES["intra_document"])
    assert block_mask(borders, STRATEGIES["intra_document"]) is mask
    assert block_mask(borders, STRATEGIES["intra_document_reset"]) is mask, "they see the same keys"
    assert block_mask(borders, STRATEGIES["anchor"]) is not mask
    narrow = replace(STRATEGIES["sliding_window"], window=3)
    assert block_mask(borders, narrow) is not block_mask(borders, replace(narrow, window=4))
    assert block_mask(Borders.of(document_BT), STRATEGIES["intra_document"]) is not mask


def test_a_mask_made_in_inference_mode_serves_training():
    with torch.inference_mode():
        borders = Borders.of(torch.tensor([[0, 1, 1, 2, 2]]))
        mask = block_mask(borders, STRATEGIES["sink_window"])
    (visible,) = (cell.cell_contents for cell in mask.mask_mod.__closure__)
    held = [*mask.as_tuple(), *(cell.cell_contents for cell in visible.__closure__)]
    held = [x for x in held if isinstance(x, torch.Tensor)]
    assert len(held) == 8 + 2, "the lists of blocks, and the documents and offsets that the rule reads"
    assert not any(x.is_inference() for x in held)


@pytest.mark.parametrize("name", ["full", "sink_window"])
def test_a_row_of_131072_tokens_takes_tens_of_megabytes(name):
    """T x T booleans would take 16 GiB, and even 128 x T of int64 128 MiB at once."""
    tokens = 131072
    document_BT = torch.arange(tokens, dtype=torch.int32)[None] // 3000
    borders = Borders.of(document_BT.clamp_(min=1))
    block_mask(Borders.of(document_BT[:, :200]), STRATEGIES[name])  # what torch allocates once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        mask = block_mask(borders, STRATEGIES[name])
    memory = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    used, peak = 0, 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    kept = sum(x.numel() * x.element_size() for x in mask.as_tuple() if isinstance(x, torch.Tensor))
    assert kept < peak < 64 * 2**20
