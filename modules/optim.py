"""AdamW and the learning rate over steps.

warm-up, then constant:  / ------------        warm-up, then cosine:  / --..__
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LambdaLR

from modules.precision import LOW_PRECISION_WEIGHTS

Schedule = Literal["constant", "cosine"]
MasterWeights = Literal["auto", "float32", "none"]
LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its schedule and clipping."""

    learning_rate: float = 3e-4
    """The highest one."""
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    """On matrices, embeddings included; not on norms and biases."""
    warmup_steps: int = 0
    """Steps of rising learning rate; the last of them has the highest."""
    schedule: Schedule = "cosine"
    """What follows the warm-up."""
    final_learning_rate_fraction: float = 0.1
    """Of the highest learning rate, in the last step of `cosine`."""
    gradient_clip_norm: float | None = 1.0
    """Longest global gradient. null: no clipping."""
    master_weights: MasterWeights = "auto"
    """`float32`: under `bf16-true` and `16-true` the optimizer moves float32 copies of the weights, with float32
    moments, and the model gets them rounded; 8 more bytes a parameter, and 4 during a step. `none`: it moves the
    low-precision weights themselves, and updates below half their last bit (2e-3 of a bfloat16 weight) are lost.
    `auto`: float32 for those two precisions, since lost updates show nowhere; none elsewhere, where weights are wide
    already."""

    def __post_init__(self) -> None:
        """Raises ValueError with all broken rules at once."""
        rules = [
            (
                "learning_rate",
                "must be a finite number above 0",
                _finite(self.learning_rate) and self.learning_rate > 0,
            ),
            ("beta1", "must be at least 0 and below 1", 0 <= self.beta1 < 1),
            ("beta2", "must be at least 0 and below 1", 0 <= self.beta2 < 1),
            (
                "weight_decay",
                "must be a finite number, at least 0",
                _finite(self.weight_decay) and self.weight_decay >= 0,
            ),
            ("warmup_steps", "must be at least 0", self.warmup_steps >= 0),
            ("schedule", f"must be one of {', '.join(get_args(Schedule))}", self.schedule in get_args(Schedule)),
            ("final_learning_rate_fraction", "must be from 0 to 1", 0 <= self.final_learning_rate_fraction <= 1),
            (
                "gradient_clip_norm",
                "must be above 0, or null for no clipping",
                self.gradient_clip_norm is None or self.gradient_clip_norm > 0,
            ),
            (
                "master_weights",
                f"must be one of {', '.join(get_args(MasterWeights))}",
                self.master_weights in get_args(MasterWeights),
            ),
        ]
        broken = [f"optimizer.{name}={getattr(self, name)!r} {rule}." for name, rule, holds in rules if not holds]
        if broken:
            raise ValueError("\n".join(broken))


class AdamWOfMasterWeights(AdamW):
    """AdamW for weights in bfloat16 or float16 that moves float32 copies of them.

        gradient (low) -> float32 -> AdamW moves the master (float32) -> rounded -> weight (low)

    Masters and both moments are float32 and part of the optimizer's state, so that a resumed run goes on bit for bit.
    A master is made of its weight at the weight's first step. Wider parameters are moved directly, as by AdamW.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            assert not (group["amsgrad"] or group["maximize"] or group["capturable"] or group["fused"])
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self._state_of(p) for p in parameters]
            moved = [state.get("master", p) for p, state in zip(parameters, states, strict=True)]
            adamw(
                moved,
                [p.grad.to(x.dtype) for p, x in zip(parameters, moved, strict=True)],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                foreach=group["foreach"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            rounded = [(p, x) for p, x in zip(parameters, moved, strict=True) if x is not p]
            if rounded:
                torch._foreach_copy_([p for p, _ in rounded], [x for _, x in rounded])
        return loss

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            wide = parameter.detach()
            if parameter.dtype in LOW_PRECISION:
                wide = state["master"] = wide.float()
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(wide), torch.zeros_like(wide)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as any optimizer does, but for the rounding of all state to the parameters' own dtype.

        Raises:
            ValueError: the state is of an optimizer without master weights.
        """
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for index, parameter in zip(saved, chain.from_iterable(g["params"] for g in self.param_groups), strict=True):
            kept = state_dict["state"].get(index, {})
            if kept and parameter.dtype in LOW_PRECISION and "master" not in kept:
                raise ValueError(
                    "The saved optimizer has no master weights. Go on with optimizer.master_weights='none', or start "
                    "a new run from the model's weights."
                )
            for name in ("master", "exp_avg", "exp_avg_sq"):
                if name in kept:  # a copy: going on must not change what was loaded
                    self.state[parameter][name] = kept[name].to(device=parameter.device, copy=True)


def check_master_weights(config: OptimizerConfig, precision: str) -> bool:
    """Whether a training in that precision (Lightning's name) moves master weights.

    Raises:
        ValueError: they are asked for where the weights are wide already.
    """
    if precision in LOW_PRECISION_WEIGHTS:
        return config.master_weights != "none"
    if config.master_weights == "float32":
        raise ValueError(
            f"optimizer.master_weights='float32' means nothing under trainer.precision={precision!r}, whose weights "
            "are float32 or wider themselves. Set optimizer.master_weights='auto' or trainer.precision='bf16-true'."
        )
    return False


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW over the trainable parameters; those with fewer than two dimensions (norms, biases) do not decay.

    Moves master weights where some parameter is in bfloat16 or float16, unless `config.master_weights` is none.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    is_low = any(p.dtype in LOW_PRECISION for p in parameters)
    kind = AdamWOfMasterWeights if is_low and config.master_weights != "none" else AdamW
    return kind(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=(config.beta1, config.beta2)
    )


def build_schedule(optimizer: Optimizer, config: OptimizerConfig, *, max_steps: int) -> LambdaLR:
    """The scheduler that sets `learning_rate_at` for every step.

    Raises:
        ValueError: the warm-up is longer than the training.
    """
    if config.warmup_steps > max_steps:
        raise ValueError(
            f"optimizer.warmup_steps={config.warmup_steps} is more than the training's {max_steps} steps. "
            "Set fewer, or more steps in trainer.max_steps."
        )
    return LambdaLR(optimizer, lambda step: _fraction_at(step, config, max_steps))


def learning_rate_at(step: int, config: OptimizerConfig, max_steps: int) -> float:
    """Learning rate of an optimizer step.

        warmup_steps=2, schedule=constant, learning_rate=1   ->   0.5 1 1 1 ...

    Args:
        step: counted from 0; steps from `max_steps` on keep the last one's.
        config: the highest rate, warm-up and schedule.
        max_steps: steps of the whole training, warm-up included.
    """
    return config.learning_rate * _fraction_at(step, config, max_steps)


def _fraction_at(step: int, config: OptimizerConfig, max_steps: int) -> float:
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    top = max(config.warmup_steps - 1, 0)
    progress = min((step - top) / max(max_steps - 1 - top, 1), 1.0)
    final = config.final_learning_rate_fraction
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


def _finite(x: float) -> bool:
    return math.isfinite(x)
