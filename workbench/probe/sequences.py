"""The text that a probe reads: sequences of one length from a corpus, and the same as rows of several documents."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from datamodules.sources.config import SourceConfig
from datamodules.sources.find import read_documents
from datamodules.tokenizers import Tokenizer
from workbench.errors import UserError, user_input

DOCUMENTS_AT_ONCE = 2048
"""Documents that are shuffled together, and so held in memory."""
DOCUMENTS_PER_ROW = 4


def read_sequences(corpus: str, tokenizer: Tokenizer, *, tokens: int, sequences: int, seed: int) -> np.ndarray:
    """[sequences, tokens] int64: the anchor token and then text.

    A document longer than that gives one sequence, its beginning; shorter ones are joined, each closed by the
    tokenizer's end token. The seed decides which documents.

    Raises:
        UserError: the corpus cannot be read, or is too short.
    """
    found: list[np.ndarray] = []
    open_sequence = np.array([tokenizer.anchor_id], np.int64)
    read = 0
    with user_input():
        for content in _shuffled(corpus, seed):
            ids = tokenizer.encode_batch([content])[0] if isinstance(content, str) else content
            ids = ids.astype(np.int64)
            read += len(ids)
            open_sequence = np.concatenate([open_sequence, ids])
            if len(open_sequence) < tokens:
                if tokenizer.end_id is not None:
                    open_sequence = np.append(open_sequence, tokenizer.end_id)
                continue
            found.append(open_sequence[:tokens])
            if len(found) == sequences:
                return np.stack(found)
            open_sequence = open_sequence[:1]
    raise UserError(
        f"{corpus}: holds {read} tokens, which make {len(found)} of the {sequences} sequences of {tokens} tokens. "
        "Ask for less by --tokens or --sequences, or name a longer corpus by --corpus."
    )


def as_rows(sequence_NT: np.ndarray, anchor_id: int) -> tuple[np.ndarray, np.ndarray]:
    """The sequences as packed rows of DOCUMENTS_PER_ROW documents that each begin with the anchor token.

    8 tokens  A a b c d e f g  ->  tokens A a A c A e A g     documents 1 1 2 2 3 3 4 4
    """
    tokens = sequence_NT.shape[1]
    document_T = np.arange(tokens) * DOCUMENTS_PER_ROW // tokens + 1
    row_NT = sequence_NT.copy()
    row_NT[:, np.diff(document_T, prepend=0) > 0] = anchor_id
    return row_NT, document_T


def positions_in_documents(document_T: np.ndarray) -> np.ndarray:
    """Positions that restart at 0 in each document."""
    starts = np.flatnonzero(np.diff(document_T, prepend=0))
    return np.arange(len(document_T)) - starts[document_T - 1]


def _shuffled(corpus: str, seed: int) -> Iterator[str | np.ndarray]:
    """Texts, or ids where the corpus is tokens already, in an order that the seed decides, some thousands at a time."""
    order = np.random.default_rng(seed)
    documents = read_documents(SourceConfig(corpus=corpus))
    while batch := list(islice(documents, DOCUMENTS_AT_ONCE)):
        for index in order.permutation(len(batch)):
            yield batch[index].content
