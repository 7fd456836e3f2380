"""AdamW and the learning rate over steps.

warm-up, then constant:  / ------------        warm-up, then cosine:  / --..__
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Literal["constant", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its schedule and clipping."""

    learning_rate: float = 3e-4
    """The highest one."""
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    """On matrices, embeddings included; not on norms."""
    warmup_steps: int = 0
    """Steps of rising learning rate; the last of them has the highest."""
    schedule: Schedule = "cosine"
    """What follows the warm-up."""
    final_learning_rate_fraction: float = 0.1
    """Of the highest learning rate, in the last step of `cosine`."""
    gradient_clip_norm: float | None = 1.0
    """Longest global gradient. null: no clipping."""

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
        ]
        broken = [f"optimizer.{name}={getattr(self, name)!r} {rule}." for name, rule, holds in rules if not holds]
        if broken:
            raise ValueError("\n".join(broken))


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW over the trainable parameters; those with fewer than two dimensions (norms) do not decay."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
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
