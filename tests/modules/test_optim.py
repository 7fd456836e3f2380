"""Learning rates in literal numbers, and which parameters decay."""

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from modules.attention.strategies import STRATEGIES
from modules.llama import Llama
from modules.optim import OptimizerConfig, build_optimizer, build_schedule, learning_rate_at
from modules.presets import ModelConfig
from modules.rotary import RotaryConfig


def rates(max_steps: int, steps: int | None = None, **settings: Any) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **settings)
    return [learning_rate_at(step, config, max_steps) for step in range(steps or max_steps)]


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (rates(4, schedule="constant"), [1, 1, 1, 1]),
        (rates(5, schedule="constant", warmup_steps=4), [0.25, 0.5, 0.75, 1, 1]),
        # Halves of a cosine from 1 to 0.2: (1 + cos(pi * s / 4)) / 2 = 1, 0.853553, 0.5, 0.146447, 0.
        (
            rates(5, final_learning_rate_fraction=0.2),
            [1, 0.2 + 0.8 * 0.8535534, 0.6, 0.2 + 0.8 * 0.1464466, 0.2],
        ),
        # The last step of the warm-up is the cosine's first, the last step of all its last; then it stays.
        (rates(4, steps=6, warmup_steps=2, final_learning_rate_fraction=0.0), [0.5, 1, 0.5, 0, 0, 0]),
        (rates(4, warmup_steps=4), [0.25, 0.5, 0.75, 1]),
        (rates(1, steps=2), [1, 0.1]),
    ],
)
def test_learning_rate_at(got: list[float], expected: list[float]) -> None:
    assert got == pytest.approx(expected, abs=1e-7)


def test_the_schedule_sets_those_rates_and_resumes() -> None:
    config = OptimizerConfig(learning_rate=3e-4, warmup_steps=3)
    expected = [learning_rate_at(step, config, 10) for step in range(10)]
    module = nn.Linear(3, 2)

    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = build_optimizer(module, config)
        return optimizer, build_schedule(optimizer, config, max_steps=10)

    optimizer, schedule = made()
    got = []
    for step in range(10):
        if step == 6:
            states = optimizer.state_dict(), schedule.state_dict()
            optimizer, schedule = made()
            optimizer.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
        got.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert got == expected


def test_matrices_decay_and_norms_do_not() -> None:
    """A step without gradient signal shrinks what decays: w * (1 - lr * decay) = w * 0.98."""
    torch.manual_seed(0)
    model = Llama(
        ModelConfig(overrides={"layers": 2}).resolve(258),
        strategy=STRATEGIES["full"], kernel="auto", rotary=RotaryConfig(),
    )  # fmt: skip
    model.lm_head = nn.Linear(128, 258, bias=False).requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=0.1, weight_decay=0.2))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        kept = 1.0 if "norm" in name or "lm_head" in name else 0.98
        torch.testing.assert_close(p, before[name] * kept, msg=lambda m, n=name: f"{n}: {m}")
    assert optimizer.defaults["betas"] == (0.9, 0.95)


def test_a_module_of_norms_alone() -> None:
    assert [group["weight_decay"] for group in build_optimizer(nn.RMSNorm(3), OptimizerConfig()).param_groups] == [0.0]


def test_all_broken_settings_are_named_at_once() -> None:
    with pytest.raises(ValueError) as error:
        OptimizerConfig(
            learning_rate=float("nan"), beta1=1.0, beta2=-0.1, weight_decay=-1.0, warmup_steps=-1,
            schedule="linear",  # type: ignore[arg-type]
            final_learning_rate_fraction=1.1, gradient_clip_norm=0.0,
        )  # fmt: skip
    assert [line.split(" ")[0] for line in str(error.value).splitlines()] == [
        "optimizer.learning_rate=nan", "optimizer.beta1=1.0", "optimizer.beta2=-0.1", "optimizer.weight_decay=-1.0",
        "optimizer.warmup_steps=-1", "optimizer.schedule='linear'", "optimizer.final_learning_rate_fraction=1.1",
        "optimizer.gradient_clip_norm=0.0",
    ]  # fmt: skip


def test_the_config_is_filled_by_omegaconf() -> None:
    merged = OmegaConf.merge(
        OmegaConf.structured(OptimizerConfig), {"gradient_clip_norm": None, "schedule": "constant"}
    )
    assert OmegaConf.to_object(merged) == OptimizerConfig(gradient_clip_norm=None, schedule="constant")


def test_a_warm_up_longer_than_the_training() -> None:
    with pytest.raises(ValueError, match=r"optimizer.warmup_steps=11 .* 10"):
        config = OptimizerConfig(warmup_steps=11)
        build_schedule(build_optimizer(nn.Linear(1, 1), config), config, max_steps=10)
