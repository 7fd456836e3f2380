"""Domain tags: the name of its source as text in front of each training document. Seen, never a target of the loss.

    tokens    A w \\n a b      source w, document a b, anchor=every_document
    labels    - - a  b -      (- no target)

The last token of the tag predicts the document's first, as an anchor in front of it would. A piece that goes on in the
next row has no new tag. To a plan a tag is the beginning of its document.

Shape letter: N documents.
"""

from typing import NamedTuple, Self

import numpy as np

from datamodules.tokenizers import Tokenizer


class DomainTags(NamedTuple):
    """The tags of N documents."""

    tokens: np.ndarray
    """int64, the ids of each source's tag, one after another."""
    begin_N: np.ndarray
    """int64, where the tag of each document begins in them."""
    length_N: np.ndarray
    """int64, its tokens."""

    @classmethod
    def of(cls, source_N: np.ndarray, sources: tuple[str, ...], tokenizer: Tokenizer) -> Self:
        """Args: int64, the index of each document's source in `sources`; their names; what makes the tokens."""
        tags = [ids.astype(np.int64) for ids in tokenizer.encode_batch([f"{name}\n" for name in sources])]
        length = np.array([tag.size for tag in tags], np.int64)
        begin = np.cumsum(length) - length
        return cls(np.concatenate(tags), begin[source_N], length[source_N])
