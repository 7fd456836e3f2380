"""Cross-entropy of the next token, from hidden states, without ever holding all logits of a long row.

    hidden [C, E] x head [V, E]  ->  logits [C, V]  ->  float32: log-softmax, loss, its gradient  ->  next chunk

A chunk is worked through once: its loss and, where gradients are wanted, its share of both gradients, so that nothing
is computed twice and one chunk's logits are all that is alive. `backward` then only multiplies by what comes in.

Products run in the hidden states' dtype (or autocast's); logits, softmax and sums, those of the weight's gradient over
chunks included, in the wider of that and float32.
`torch.nn.functional.linear_cross_entropy` chunks too, but needs torch 2.13 and sums in the inputs' dtype.

Shape letters: B rows, T tokens in a row, N = B * T, C tokens of a chunk, E width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from modules.autocast import product_dtype, without_autocast
from modules.batch import NO_TARGET

CHUNK_LOGITS = 2**25
"""Logits of a chunk by default: 128 MiB in float32."""


def default_chunk_tokens(vocabulary_size: int) -> int:
    """How many tokens' logits are alive at once: CHUNK_LOGITS / V. 261 at 128 256, 8192 at 4096, 130 055 at 258."""
    return max(1, CHUNK_LOGITS // vocabulary_size)


def cross_entropy_sum(
    hidden_BTE: Tensor, head_weight_VE: Tensor, labels_BT: Tensor, *, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the losses over all targets, with gradients, and the number of targets.

    Args:
        hidden_BTE: hidden states.
        head_weight_VE: the matrix that makes logits of them.
        labels_BT: int64, already shifted; NO_TARGET where there is nothing to predict.
        chunk_tokens: tokens whose logits are alive at once; None: `default_chunk_tokens`.
    Returns:
        The sum, a float32 (float64 for float64 inputs) scalar, exactly 0 with zero gradients where there is no target;
        the count, an int64 scalar.
    """
    count = (labels_BT != NO_TARGET).sum()
    if not (torch.is_grad_enabled() and (hidden_BTE.requires_grad or head_weight_VE.requires_grad)):
        return token_losses(hidden_BTE, head_weight_VE, labels_BT, chunk_tokens=chunk_tokens).sum(), count
    how = (chunk_tokens or default_chunk_tokens(len(head_weight_VE)), product_dtype(hidden_BTE))
    loss_sum = _CrossEntropy.apply(hidden_BTE.flatten(0, -2), head_weight_VE, labels_BT.flatten(), *how)
    return loss_sum, count


@torch.no_grad()
def token_losses(
    hidden_BTE: Tensor, head_weight_VE: Tensor, labels_BT: Tensor, *, chunk_tokens: int | None = None
) -> Tensor:
    """Loss of every position, [B, T] in float32 (float64 for float64 inputs), 0 without a target. No gradients.

    Arguments as in `cross_entropy_sum`.
    """
    how = (chunk_tokens or default_chunk_tokens(len(head_weight_VE)), product_dtype(hidden_BTE))
    loss_N, _, _ = _work_through(
        hidden_BTE.flatten(0, -2), head_weight_VE, labels_BT.flatten(), *how, for_hidden=False, for_weight=False
    )
    return loss_N.view(labels_BT.shape)


class _CrossEntropy(torch.autograd.Function):
    """Sum of the losses of [N, E] hidden states; both gradients are made on the way forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, labels_N: Tensor, chunk_tokens: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(hidden_NE, weight_VE, labels_N)
        ctx.how = {
            "chunk_tokens": chunk_tokens,
            "dtype": dtype,
            "for_hidden": ctx.needs_input_grad[0],
            "for_weight": ctx.needs_input_grad[1],
        }
        loss_N, *ctx.gradients = _work_through(hidden_NE, weight_VE, labels_N, **ctx.how)
        return loss_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # a second pass over a retained graph: the first one scaled them in place
            _, *gradients = _work_through(*ctx.saved_tensors, **ctx.how)
        inputs = ctx.saved_tensors[:2]
        scaled = (
            None if x is None else x.mul_(gradient).to(original.dtype)
            for x, original in zip(gradients, inputs, strict=True)
        )
        return *scaled, None, None, None


def _work_through(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    labels_N: Tensor,
    chunk_tokens: int,
    dtype: torch.dtype,
    *,
    for_hidden: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses [N] and, where wanted, the gradients of their sum, all of them in the wide dtype."""
    wide = torch.promote_types(torch.float32, dtype)
    gradient_NE = torch.empty_like(hidden_NE, dtype=wide) if for_hidden else None
    gradient_VE = torch.zeros_like(weight_VE, dtype=wide) if for_weight else None
    weight_VE = weight_VE.to(dtype)
    losses = []
    with without_autocast(hidden_NE):
        for start in range(0, len(hidden_NE), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            gradient_CE = None if gradient_NE is None else gradient_NE[chunk]
            losses.append(_chunk(hidden_NE[chunk].to(dtype), weight_VE, labels_N[chunk], gradient_CE, gradient_VE))
    return torch.cat(losses), gradient_NE, gradient_VE


def _chunk(
    hidden_CE: Tensor, weight_VE: Tensor, labels_C: Tensor, gradient_CE: Tensor | None, gradient_VE: Tensor | None
) -> Tensor:
    """Losses [C]; writes the hidden states' gradient and adds the chunk's share to the weight's, where given.

    A function of its own, so that nothing of [C, V] outlives it, and the softmax in the logits' own memory.
    """
    wide = torch.promote_types(torch.float32, hidden_CE.dtype)
    logits_CV = (hidden_CE @ weight_VE.T).to(wide)
    has_target_C, target_C1 = labels_C != NO_TARGET, labels_C.clamp(min=0)[:, None]
    logits_CV -= logits_CV.amax(dim=1, keepdim=True)
    target_logit_C = logits_CV.gather(1, target_C1)[:, 0]
    exponential_CV = logits_CV.exp_()
    total_C = exponential_CV.sum(dim=1)
    loss_C = (total_C.log() - target_logit_C).masked_fill(~has_target_C, 0)
    if gradient_CE is None and gradient_VE is None:
        return loss_C

    # Softmax minus one at the target; zero without a target.
    gradient_CV = exponential_CV.div_(total_C[:, None])
    gradient_CV.scatter_add_(1, target_C1, gradient_CV.new_full((), -1).expand_as(target_C1))
    gradient_CV = gradient_CV.masked_fill_(~has_target_C[:, None], 0).to(weight_VE.dtype)
    if gradient_CE is not None:
        gradient_CE.copy_(gradient_CV @ weight_VE)
    if gradient_VE is not None:
        if gradient_VE.dtype == weight_VE.dtype:
            gradient_VE.addmm_(gradient_CV.T, hidden_CE)
        else:
            gradient_VE += gradient_CV.T @ hidden_CE
    return loss_C
