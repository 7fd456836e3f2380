"""The probe's numbers from whole attention matrices, written apart as plain loops over the paper's formulas."""

import numpy as np


def deviations(attention_SLHTT, score_SLHTT):
    """Set 0 is the reference. Everything in float64 numpy; one dict for each other set."""
    found = []
    for attention_LHTT, score_LHTT in zip(attention_SLHTT[1:], score_SLHTT[1:], strict=True):
        moved = np.abs(np.asarray(attention_LHTT, np.float64) - np.asarray(attention_SLHTT[0], np.float64))
        layers, heads, tokens, _ = moved.shape
        token_T = np.zeros(tokens)
        row_deviation = first = logit = 0.0
        for layer in range(layers):
            for head in range(heads):
                for column in range(tokens):
                    token_T[column] += sum(moved[layer, head, row, column] for row in range(tokens)) / (tokens - column)
                row_deviation += moved[layer, head].sum() / (layers * heads * tokens)
                first += moved[layer, head, :, 0].sum() / (layers * heads * tokens)
                scores = np.abs(score_LHTT[layer, head, :, 0] - score_SLHTT[0][layer, head, :, 0])
                logit += scores.sum() / tokens
        found.append(
            {
                "deviation": token_T.sum(),
                "token_T": token_T,
                "row_deviation": row_deviation,
                "first_token_share": first / row_deviation,
                "logit_deviation": logit,
            }
        )
    return found
