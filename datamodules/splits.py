"""Which documents train and which validate, and how each part is packed. From lengths alone, without torch."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from datamodules.config import DataConfig
from datamodules.document_table import DocumentTable
from datamodules.domain_tags import DomainTags
from datamodules.interleaving import interleave
from datamodules.mixes import mix_documents
from datamodules.packing import PackPlan, plan_rows
from datamodules.tokenizers import Tokenizer


class PackedPart(NamedTuple):
    """The training or the validation documents and their rows."""

    documents: np.ndarray
    """int64, documents of the corpus in the order they were packed, repeated ones as often as they come;
    `plan.piece_document` indexes this."""
    plan: PackPlan
    mix: Mapping[str, int | float] = MappingProxyType({})
    """What became of each source, see `Mix.report`; empty without a mix."""
    tags: DomainTags | None = None
    """In front of `documents`, to which the plan reckons them; None without `domain_tags`."""

    @property
    def piece_tag(self) -> np.ndarray:
        """int64 [pieces], tokens of a domain tag that each piece of the plan begins with."""
        if self.tags is None:
            return np.zeros_like(self.plan.piece_length)
        left = self.tags.length_N[self.plan.piece_document] - self.plan.piece_start
        return np.clip(left, 0, self.plan.piece_length)


def split_documents(
    lengths: np.ndarray, *, validation_fraction: float, validation_tokens: int, shuffle_seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(training, validation) documents, both in shuffled order, every document in one of them.

    Of the shuffled documents the first `validation_fraction` (at least one) are asked in turn: each validates while
    the tokens of all such stay within `validation_tokens`, else it trains. Nothing else takes part, so all runs
    over one store with one seed validate on the same documents.

        lengths 5 9 2 4, shuffled 1 2 0 3, fraction 0.75, at most 8 tokens  ->  validation 2 0, training 1 3

    Raises:
        ValueError: no document or no target is left to validate on, or no document to train on.
    """
    if lengths.size < 2:
        raise ValueError(
            "data.corpus holds one document, but one is needed to train on and another to validate on. "
            "Set a corpus of at least two documents."
        )
    order = np.random.default_rng(shuffle_seed).permutation(lengths.size)
    asked = order[: max(1, round(validation_fraction * lengths.size))]
    left = validation_tokens
    chosen = np.zeros(lengths.size, bool)
    for document, length in zip(asked.tolist(), lengths[asked].tolist(), strict=True):
        if length <= left:
            chosen[document] = True
            left -= length
    if not (lengths[chosen] > 1).any():
        raise ValueError(
            f"data.validation_fraction={validation_fraction} and data.validation_tokens={validation_tokens} leave no "
            f"document to validate on: {asked.size} of {lengths.size} were asked, the shortest of them with "
            f"{lengths[asked].min()} tokens (one of 2 or more is needed). Set more data.validation_tokens or a larger "
            "data.validation_fraction."
        )
    if chosen.all():
        raise ValueError(
            f"data.validation_fraction={validation_fraction} leaves none of {lengths.size} documents to train on. "
            "Set a smaller fraction or a corpus of more documents."
        )
    return order[~chosen[order]], order[chosen[order]]


def plan_parts(table: DocumentTable, config: DataConfig, tokenizer: Tokenizer) -> tuple[PackedPart, PackedPart]:
    """(training, validation), packed.

    Validation is always `best_fit` with long documents split and nothing dropped, so that every strategy and both
    placements of anchors score the same targets; mixes, domain tags and interleaved chunks are of training documents
    alone. In the training report a repeated document counts as often as it comes.

    Args:
        table: all documents.
        config: `anchor` resolved (not `auto`).
        tokenizer: makes the domain tags.
    Raises:
        ValueError: nothing left to train or validate on, or no full row.
    """
    lengths = table.lengths
    training, validation = split_documents(
        lengths,
        validation_fraction=config.validation_fraction,
        validation_tokens=config.validation_tokens,
        shuffle_seed=config.shuffle_seed,
    )
    unhurt = replace(config, packing="best_fit", long_documents="split", tail="pad")
    mixed = mix_documents(training, table, config)
    tags = None
    if config.domain_tags:
        tags = DomainTags.of(table.source[mixed.documents], table.sources, tokenizer)
    trained = _pack(mixed.documents, lengths, config, tags)._replace(mix=mixed.report)
    if config.interleave:
        trained = trained._replace(plan=interleave(trained.plan, trained.piece_tag, seed=config.shuffle_seed))
    parts = trained, _pack(validation, lengths, unhurt)
    if not (parts[1].plan.piece_length > 1).any():
        raise ValueError(
            f"data.context_length={config.context_length} beside an anchor cuts documents into single tokens, which "
            "leaves nothing to validate on. Set data.context_length=3 or more, or data.anchor=none."
        )
    return parts


def _pack(documents: np.ndarray, lengths: np.ndarray, config: DataConfig, tags: DomainTags | None = None) -> PackedPart:
    assert config.anchor != "auto", "whoever knows the attention strategy resolves data.anchor"
    plan = plan_rows(
        lengths[documents] + (0 if tags is None else tags.length_N),
        context_length=config.context_length,
        anchor=config.anchor,
        packing=config.packing,
        long_documents=config.long_documents,
        tail=config.tail,
    )
    return PackedPart(documents, plan, tags=tags)
