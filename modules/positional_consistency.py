"""Whether a whole model says the same wherever its text stands: logits of the same tokens at different positions.

Under intra-document attention continuous and restarting positions give the same distances, so in exact arithmetic the
same logits. What remains is what rounding does.

Shape letters: S position sets, the first of them the reference; T tokens; E width; C tokens at once; V vocabulary.
Source: arXiv 2411.13476, section 3.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modules.llama import Llama
from modules.loss import default_chunk_tokens


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """A position set's logits against the reference's."""

    mean_kl: float
    """Mean over tokens of KL(reference || this set) in nats."""
    max_logit_difference: float


def logits_at_once(vocabulary_size: int) -> int:
    """Tokens whose logits are compared together: a quarter of what a training step holds, since these are float64."""
    return max(1, default_chunk_tokens(vocabulary_size) // 4)


@torch.no_grad()
def compare_logits(model: Llama, hidden_STE: Tensor) -> list[Consistency]:
    """Of every position set but the first.

    Args:
        model: makes logits of hidden states, in its own dtype; they are compared in float64.
        hidden_STE: hidden states after the last norm.
    """
    sets, tokens = hidden_STE.shape[:2]
    kl_sum, largest = torch.zeros(sets - 1, dtype=torch.float64), torch.zeros(sets - 1, dtype=torch.float64)
    chunk = logits_at_once(model.config.vocabulary_size)
    for start in range(0, tokens, chunk):
        reference_CV = model.logits(hidden_STE[0, start : start + chunk]).double()
        reference_log_CV = reference_CV.log_softmax(-1)
        probability_CV = reference_log_CV.exp()
        for index in range(1, sets):
            logits_CV = model.logits(hidden_STE[index, start : start + chunk]).double()
            difference = (logits_CV - reference_CV).abs().max().cpu()
            largest[index - 1] = torch.maximum(largest[index - 1], difference)
            kl_sum[index - 1] += (probability_CV * (reference_log_CV - logits_CV.log_softmax(-1))).sum().cpu()
    return [
        Consistency(mean_kl=max(0.0, float(kl) / tokens), max_logit_difference=float(most))
        for kl, most in zip(kl_sum, largest, strict=True)
    ]
