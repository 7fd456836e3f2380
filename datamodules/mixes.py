"""Which training documents come how often: sources by weight, and long documents more often than short ones.

    weights code 3, prose 1; 800 tokens in all       code gives 600 tokens, prose 200: whole passes over its documents,
                                                     each in an order of its own, and a part of one more
    upsample_longer_than 1000, keep_shorter 0.1      of each source's tokens a tenth of what short documents held stays
                                                     theirs, the rest is taken from its long ones again and again

Lengths change and the mix of sources does not: upsampling over all documents at once would favour sources of long ones.

Source: Fu et al., "Data Engineering for Scaling Language Models to 128K Context", arXiv 2402.10171 (per-source
upsampling).
"""

from typing import NamedTuple

import numpy as np

from datamodules.config import DataConfig
from datamodules.document_table import DocumentTable


class Mix(NamedTuple):
    """Training documents, some left out and some several times, and what became of each source."""

    documents: np.ndarray
    """int64, index into all documents; in the order to pack them."""
    report: dict[str, int | float]
    """`SOURCE/documents`, `SOURCE/tokens`, `SOURCE/share` of all tokens, `SOURCE/passes` over what it has."""


def mix_documents(documents: np.ndarray, table: DocumentTable, config: DataConfig) -> Mix:
    """Applies `mix`, `mix_tokens`, `upsample_longer_than` and `keep_shorter`; without them, every document once.

    A source gets its share of the tokens to within half of the document that it ends with, and one document at least.

    Args:
        documents: int64, the training documents in shuffled order.
        table: lengths and sources of all documents.
    Raises:
        ValueError: a weight for no source, or for one without training documents.
    """
    if not config.mix and config.upsample_longer_than is None:
        return Mix(documents, {})
    source = table.source[documents]
    weights = _weights(np.unique(source), table, config)
    tokens = {index: int(table.lengths[documents[source == index]].sum()) for index in weights}
    total = config.mix_tokens or sum(tokens.values())
    random = np.random.default_rng((config.shuffle_seed, 1))  # another stream than the split's
    chosen = []
    for index, weight in weights.items():
        own = documents[source == index]
        wanted = total * (weight if config.mix else tokens[index] / sum(tokens.values()))
        chosen.append(_of_one_source(own, table.lengths, wanted, config, random))
    mixed = np.concatenate(chosen)
    report: dict[str, int | float] = {}
    taken = int(table.lengths[mixed].sum())
    for index, own in zip(weights, chosen, strict=True):
        name, held = table.sources[index], int(table.lengths[own].sum())
        report[f"{name}/documents"] = own.size
        report[f"{name}/tokens"] = held
        report[f"{name}/share"] = held / taken
        report[f"{name}/passes"] = held / tokens[index]
    return Mix(mixed[random.permutation(mixed.size)], report)


def _weights(present: np.ndarray, table: DocumentTable, config: DataConfig) -> dict[int, float]:
    """Share of each source that takes part, by its index."""
    if not config.mix:
        return {int(index): 1.0 for index in present}
    known = {name: index for index, name in enumerate(table.sources)}
    unknown = [name for name in config.mix if name not in known]
    if unknown:
        raise ValueError(
            f"data.mix.{unknown[0]}={config.mix[unknown[0]]!r} names no source. The documents are of "
            f"{_listed(table.sources)}. Set weights for those, or data.source_field to the field that names the source."
        )
    total = sum(config.mix.values())
    weights = {known[name]: weight / total for name, weight in config.mix.items() if weight}
    absent = [table.sources[index] for index in weights if index not in present]
    if absent:
        raise ValueError(
            f"data.mix.{absent[0]}={config.mix[absent[0]]!r}: all documents of that source validate, none is left to "
            "train on. Set a smaller data.validation_fraction, or leave the source out."
        )
    return weights


def _listed(names: tuple[str, ...], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _of_one_source(
    documents: np.ndarray, lengths: np.ndarray, wanted: float, config: DataConfig, random: np.random.Generator
) -> np.ndarray:
    own = lengths[documents]
    long = own > config.upsample_longer_than if config.upsample_longer_than is not None else np.zeros(own.size, bool)
    if not long.any():
        return _fill(documents, own, wanted, random)
    of_short = wanted * config.keep_shorter * int(own[~long].sum()) / int(own.sum())
    short = _fill(documents[~long], own[~long], of_short, random)
    left = wanted - int(lengths[short].sum())
    return np.concatenate([short, _fill(documents[long], own[long], max(left, 1), random)])


def _fill(documents: np.ndarray, lengths: np.ndarray, wanted: float, random: np.random.Generator) -> np.ndarray:
    """Documents of together about `wanted` tokens: as they stand, then again and again, each pass in its own order."""
    if not documents.size or wanted <= 0:
        return documents[:0]
    passes, left = divmod(wanted, int(lengths.sum()))
    orders = [np.arange(documents.size)]
    orders += [random.permutation(documents.size) for _ in range(int(passes))]
    last = orders.pop()
    ends = np.cumsum(lengths[last])
    # The document that `left` falls into is taken where that comes nearer than leaving it out.
    count = int(np.searchsorted(ends - lengths[last] / 2, left, side="right"))
    if not orders:
        count = max(count, 1)
    return documents[np.concatenate([*orders, last[:count]])]
