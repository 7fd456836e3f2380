"""What each kernel refuses, how `auto` decides, and what `attend` checks."""

from dataclasses import replace

import pytest
import torch

from modules.attention.attend import attend
from modules.attention.borders import Borders
from modules.attention.capabilities import KERNELS, can_serve, resolve_kernel
from modules.attention.config import AttentionConfig
from modules.attention.reference import MAX_TOKENS
from modules.attention.strategies import STRATEGIES

WINDOWED = replace(STRATEGIES["full"], name="windowed", window=4)


def asked(**changes):
    request = {"strategy": STRATEGIES["anchor"], "device_type": "cpu", "dtype": torch.float32, "head_width": 64}
    return request | changes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_who_trains_what_on_cpu(strategy, dtype):
    serving = [kernel for kernel in KERNELS if can_serve(kernel, **asked(strategy=strategy, dtype=dtype)) is None]
    assert serving == (["sdpa", "reference"] if strategy.window is None else ["reference"])


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        ("sdpa", {"device_type": "xpu"}, "not on xpu"),
        ("sdpa", {"strategy": WINDOWED}, "attention.strategy='windowed'"),
        ("sdpa", {"dtype": torch.int64}, "not in torch.int64"),
        ("sdpa", {"device_type": "mps", "dtype": torch.float64}, "no float64"),
        ("reference", {"dtype": torch.int64}, "not in torch.int64"),
        ("reference", {"tokens": MAX_TOKENS + 1}, f"at most {MAX_TOKENS} tokens"),
    ],
)
def test_refusals_are_sentences(kernel, changes, reason):
    refusal = can_serve(kernel, **asked(**changes))
    assert refusal is not None
    assert reason in refusal
    assert refusal.endswith(".")
    with pytest.raises(ValueError) as error:
        resolve_kernel(kernel, **asked(**changes))
    assert f"attention.kernel={kernel!r}" in str(error.value)
    assert refusal in str(error.value)


def test_auto_takes_the_fastest_that_can():
    assert resolve_kernel("auto", **asked()) == "sdpa"
    assert resolve_kernel("auto", **asked(strategy=WINDOWED)) == "reference"
    assert resolve_kernel("reference", **asked()) == "reference"
    with pytest.raises(ValueError, match=r"attention.kernel='auto' finds no kernel .* sdpa: .* reference: "):
        resolve_kernel("auto", **asked(strategy=WINDOWED, tokens=MAX_TOKENS + 1))


def test_an_impossible_choice_names_the_way_out():
    with pytest.raises(ValueError, match=r"Set attention\.kernel='auto' or 'reference'"):
        resolve_kernel("sdpa", **asked(strategy=WINDOWED))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "anchr"}, r"attention.strategy='anchr' is none of 'full', .*Did you mean 'anchor'\?"),
        ({"strategy": "zzz"}, r"attention.strategy='zzz' is none of 'full', .*'sink_window'\.$"),
        ({"kernel": "spda"}, r"attention.kernel='spda' is none of 'auto', .*Did you mean 'sdpa'\?"),
    ],
)
def test_config_suggests_the_right_name(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**settings)


def test_config_is_filled_by_omegaconf():
    omegaconf = pytest.importorskip("omegaconf")
    merged = omegaconf.OmegaConf.merge(omegaconf.OmegaConf.structured(AttentionConfig), {"strategy": "anchor"})
    assert omegaconf.OmegaConf.to_object(merged) == AttentionConfig(strategy="anchor", kernel="auto")


def inputs(rows=1, heads=4, kv_heads=2, tokens=5, width=8, dtype=torch.float32):
    return [torch.randn(rows, h, tokens, width, dtype=dtype) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize(
    ("q_k_v", "message"),
    [
        ([x[0] for x in inputs()], r"takes q \[B, H, T, D\]"),
        ([inputs()[0], inputs()[1], inputs(kv_heads=1)[2]], r"takes q \[B, H, T, D\]"),
        (inputs(heads=5), "must divide"),
        ([inputs()[0], *inputs(tokens=6)[1:]], "must agree"),
        (inputs(tokens=6), "The borders describe"),
        ([inputs()[0].double(), *inputs()[1:]], "cast them to one dtype"),
    ],
)
def test_attend_refuses_what_does_not_fit(q_k_v, message):
    with pytest.raises(ValueError, match=message):
        attend(*q_k_v, Borders.of(torch.ones(1, 5, dtype=torch.long)), STRATEGIES["full"])


def test_reference_refuses_a_long_row_before_it_takes_the_memory():
    tokens = MAX_TOKENS + 1
    with pytest.raises(ValueError, match=f"at most {MAX_TOKENS} tokens, not {tokens}"):
        attend(
            *inputs(heads=1, kv_heads=1, tokens=tokens, width=1),
            Borders.of(torch.ones(1, tokens, dtype=torch.long)),
            STRATEGIES["full"],
            kernel="reference",
        )


@pytest.mark.parametrize(
    ("settings", "window", "sink"),
    [
        ({"strategy": "full"}, None, 0),
        ({"strategy": "sliding_window"}, 1024, 0),
        ({"strategy": "sliding_window", "window": 5}, 5, 0),
        ({"strategy": "sink_window", "window": 5}, 5, 4),
        ({"strategy": "sink_window", "sink": 0}, 1024, 0),
    ],
)
def test_window_and_sink_are_settings(settings, window, sink):
    strategy = AttentionConfig(**settings).resolve()
    assert (strategy.name, strategy.window, strategy.sink) == (settings["strategy"], window, sink)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "anchor", "window": 5}, "attention.window=5 .* 'sliding_window' or 'sink_window'"),
        ({"strategy": "sliding_window", "sink": 5}, "attention.sink=5 .* to 'sink_window'"),
        ({"strategy": "sliding_window", "window": 0}, "attention.window=0 must be at least 1"),
        ({"strategy": "sink_window", "sink": -1}, "attention.sink=-1 must be at least 0"),
    ],
)
def test_a_window_that_means_nothing_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**settings)
