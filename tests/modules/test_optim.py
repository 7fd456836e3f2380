"""Learning rates in literal numbers, which parameters decay, and what master weights keep."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from modules.attention.strategies import STRATEGIES
from modules.language_model import LanguageModel
from modules.llama import Llama
from modules.optim import (
    AdamWOfMasterWeights,
    OptimizerConfig,
    build_optimizer,
    build_schedule,
    check_master_weights,
    learning_rate_at,
)
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
            master_weights="bfloat16",  # type: ignore[arg-type]
        )  # fmt: skip
    assert [line.split(" ")[0] for line in str(error.value).splitlines()] == [
        "optimizer.learning_rate=nan", "optimizer.beta1=1.0", "optimizer.beta2=-0.1", "optimizer.weight_decay=-1.0",
        "optimizer.warmup_steps=-1", "optimizer.schedule='linear'", "optimizer.final_learning_rate_fraction=1.1",
        "optimizer.gradient_clip_norm=0.0", "optimizer.master_weights='bfloat16'",
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


# Master weights.


def one_weight(value: float, dtype: torch.dtype) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.full((3, 2), value, dtype=dtype))
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, 0.02])
def test_a_thousand_small_updates_move_the_weight_with_master_weights_alone(value: float, dtype: torch.dtype) -> None:
    """Each by 1e-4 of it (Adam's step under a constant gradient is the learning rate): 10 % in all."""
    moved = {}
    for choice in ("auto", "float32", "none"):
        module = one_weight(value, dtype)
        config = OptimizerConfig(learning_rate=1e-4 * value, weight_decay=0.0, master_weights=choice)  # type: ignore[arg-type]
        optimizer = build_optimizer(module, config)
        for _ in range(1000):
            module.weight.grad = torch.ones_like(module.weight)
            optimizer.step()
        assert module.weight.dtype == dtype
        moved[choice] = (module.weight.double() / value).mean().item()
    assert moved["auto"] == moved["float32"] == pytest.approx(0.9, abs=6e-3)
    if dtype == torch.bfloat16:  # float16 has three bits more and only rounds such updates, to half or twice their size
        assert moved["none"] == pytest.approx(1.0, abs=2e-3)


def test_master_weights_are_what_float32_training_has() -> None:
    """The same gradients through AdamW on float32 weights, both groups, decay, schedule; the model is that, rounded."""

    def made(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4, bias=False), nn.RMSNorm(4)).bfloat16().to(dtype)

    config = OptimizerConfig(learning_rate=3e-3, weight_decay=0.3, warmup_steps=3)
    low, wide = made(torch.bfloat16), made(torch.float32)
    ours, theirs = build_optimizer(low, config), build_optimizer(wide, config)
    assert isinstance(ours, AdamWOfMasterWeights) and type(theirs) is torch.optim.AdamW
    schedules = [build_schedule(optimizer, config, max_steps=20) for optimizer in (ours, theirs)]
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        for x, y in zip(low.parameters(), wide.parameters(), strict=True):
            x.grad = torch.randn(x.shape, generator=generator).bfloat16()
            y.grad = x.grad.float()
        if step == 7:  # a parameter without a gradient stays as it is
            low[1].weight.grad = wide[1].weight.grad = None
        ours.step()
        theirs.step()
        for schedule in schedules:
            schedule.step()
        for x, y in zip(low.parameters(), wide.parameters(), strict=True):
            assert torch.equal(ours.state[x]["master"], y) and torch.equal(x, y.bfloat16())


def test_wide_parameters_beside_low_ones_are_moved_directly() -> None:
    module = nn.ModuleList([one_weight(1.0, torch.bfloat16), one_weight(1.0, torch.float32)])
    optimizer = build_optimizer(module, OptimizerConfig(learning_rate=1e-4, weight_decay=0.0))
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    low, wide = module.parameters()
    assert "master" not in optimizer.state[wide] and torch.equal(optimizer.state[low]["master"], wide)


def test_a_state_with_master_weights_reloads_bit_for_bit(tmp_path: Path) -> None:
    """Through a file that is read without unpickling; half way is what an unbroken run has there."""
    config = OptimizerConfig(learning_rate=1e-4)
    gradients = torch.randn(40, 6, 5, generator=torch.Generator().manual_seed(0)).bfloat16()

    def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            module.weight.grad = gradients[step]
            optimizer.step()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = nn.Linear(5, 6, bias=False).bfloat16()
        return module, build_optimizer(module, config)

    unbroken, unbroken_optimizer = made()
    train(unbroken, unbroken_optimizer, range(40))
    first, first_optimizer = made()
    train(first, first_optimizer, range(20))
    torch.save({"module": first.state_dict(), "optimizer": first_optimizer.state_dict()}, tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    second, second_optimizer = made()
    second.load_state_dict(saved["module"])
    second_optimizer.load_state_dict(saved["optimizer"])
    before = {name: saved["optimizer"]["state"][0][name].clone() for name in ("master", "exp_avg", "exp_avg_sq")}
    train(second, second_optimizer, range(20, 40))
    assert torch.equal(second.weight, unbroken.weight)
    kept, expected = second_optimizer.state[second.weight], unbroken_optimizer.state[unbroken.weight]
    assert {name: x.dtype for name, x in kept.items()} == dict.fromkeys(
        ("master", "step", "exp_avg", "exp_avg_sq"), torch.float32
    )
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    for name, value in before.items():
        assert torch.equal(saved["optimizer"]["state"][0][name], value), f"training changed the loaded {name}"


def test_a_state_without_master_weights_is_refused_where_they_are_moved() -> None:
    module = nn.Linear(2, 2).bfloat16()
    plain = build_optimizer(module, OptimizerConfig(master_weights="none"))
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    plain.step()
    with pytest.raises(ValueError, match=r"no master weights.*optimizer\.master_weights='none'"):
        build_optimizer(module, OptimizerConfig()).load_state_dict(plain.state_dict())


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "16-mixed"])
def test_master_weights_mean_something_for_low_precision_weights_only(precision: str) -> None:
    with pytest.raises(ValueError, match=rf"optimizer\.master_weights='float32'.*trainer\.precision='{precision}'"):
        check_master_weights(OptimizerConfig(master_weights="float32"), precision)
    for choice in ("auto", "none"):
        assert not check_master_weights(OptimizerConfig(master_weights=choice), precision)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_low_precision_weights_have_master_weights_unless_told_otherwise(precision: str) -> None:
    assert check_master_weights(OptimizerConfig(), precision)
    assert not check_master_weights(OptimizerConfig(master_weights="none"), precision)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [1.0, None])
def test_gradients_are_clipped_by_a_norm_in_float32(dtype: torch.dtype, limit: float | None) -> None:
    """By hand: 3000 gradients of 3 and 6000 of 4. The sum of their squares, 123 000, is more than float16 holds."""
    shape = ModelConfig(overrides={"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "hidden_width": 32}).resolve(
        258
    )
    llama = Llama(shape, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig())
    config = OptimizerConfig(gradient_clip_norm=limit)
    module = LanguageModel(llama, optimizer=config, max_steps=1).to(dtype)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    module.model.embed_tokens.weight.grad.view(-1)[:3000] = 3
    module.model.embed_tokens.weight.grad.view(-1)[3000:8000] = 4
    module.model.layers[0].mlp.up_proj.weight.grad.view(-1)[:1000] = 4
    before = [p.grad.clone() for p in module.parameters()]
    module.configure_gradient_clipping(torch.optim.SGD(module.parameters()))
    norm = (3000 * 9 + 6000 * 16) ** 0.5
    assert module._gradient_norm is not None and module._gradient_norm.dtype == torch.float32
    assert module._gradient_norm.item() == pytest.approx(norm, rel=1e-6)
    after = torch.cat([p.grad.flatten().double() for p in module.parameters()])
    expected = torch.cat([x.flatten().double() for x in before]) * (1 if limit is None else limit / norm)
    torch.testing.assert_close(after, expected, rtol=2**-8 if dtype == torch.bfloat16 else 2**-9, atol=1e-7)
