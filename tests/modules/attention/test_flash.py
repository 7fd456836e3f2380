"""The `flash` kernel hands each generation of flash-attn what it documents, picks the right one, and refuses the rest.

Packages with the documented signatures are installed for a test; what they compute is the documented plain attention.
That the arguments are right, and the real packages on CUDA: test_varlen_call.py.
"""

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modules.attention import flash
from modules.attention.borders import Borders
from modules.attention.capabilities import Request
from modules.attention.strategies import STRATEGIES
from tests.oracles.dense_attention import dense_attention

DOCUMENTS = [[0, 1, 1, 1, 1, 2, 2, 2, 3, 4, 4, 4], [0, 1, 1, 1, 1, 1, 1, 2, 2, -1, -1, -1]]
SERVED = ("full", "intra_document", "intra_document_reset", "anchor", "sliding_window")
WINDOW = 3

START = """
from tests.oracles.varlen_attention import varlen_attention

deterministic_seen = []


def flash_attn_varlen_func(
"""
GENERATION_2 = """
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):
    assert (dropout_p, softmax_scale, softcap, alibi_slopes, return_attn_probs) == (0.0, None, 0.0, None, False)
    deterministic_seen.append(deterministic)
    return varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window_size=window_size
    )
"""
GENERATION_3_BETA = """
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
    window_size=(-1, -1), deterministic=False, seqused_q=None, seqused_k=None, block_table=None,
):
    assert (softmax_scale, seqused_q, seqused_k, block_table) == (None,) * 4
    deterministic_seen.append(deterministic)
    out = varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window_size=window_size
    )
    return out, out.detach().sum(-1).T
"""
GENERATION_3 = """
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):
    assert (seqused_q, seqused_k, softmax_scale, qv, attention_chunk, softcap) == (None, None, None, None, 0, 0.0)
    deterministic_seen.append(deterministic)
    return varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window_size=window_size
    )
"""
GENERATION_4 = """
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, return_lse=False,
):
    assert (qv, min_seqlen_k, seqused_q, seqused_k, softmax_scale, learnable_sink, mask_mod) == (None,) * 7
    deterministic_seen.append(deterministic)
    left, right = window_size
    assert left is None or left >= 0, "an open end is None here"
    window_size = (-1 if left is None else left, -1 if right is None else right)
    out = varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window_size=window_size
    )
    return out, None
"""
PACKAGES = {
    "2.7.0": ("flash-attn", "2.7.0", "flash_attn/__init__.py", GENERATION_2),
    "2.8.3": ("flash-attn", "2.8.3+cu12torch2.8", "flash_attn/__init__.py", GENERATION_2),
    "3 beta": ("flash_attn_3", "3.0.0b1", "flash_attn_interface.py", GENERATION_3_BETA),
    "3": ("flash_attn_3", "3.0.0", "flash_attn_interface.py", GENERATION_3),
    "4": ("flash-attn-4", "4.0.0b27", "flash_attn/cute/__init__.py", GENERATION_4),
}
HOPPER, AMPERE, BLACKWELL, CONSUMER = (9, 0), (8, 6), (10, 0), (12, 0)


def forget() -> None:
    """Installed packages are looked up once in a process."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        del sys.modules[name]
    for cached in (flash.installed_version, flash.load, flash._choose):
        cached.cache_clear()
    importlib.invalidate_caches()


class Machine:
    """A card and what is installed beside it, as far as Python and torch can tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "card")
        monkeypatch.setattr(torch.version, "hip", None)
        self.card(HOPPER)

    def card(self, capability: tuple[int, int]) -> None:
        self.monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    def install(self, *packages: str, version: str | None = None, body: str | None = None) -> None:
        for package in packages:
            distribution, usual_version, file, signature = PACKAGES[package]
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(START + signature if body is None else body)
            number = version or usual_version
            information = self.folder / f"{distribution.replace('-', '_')}-{number}.dist-info"
            information.mkdir()
            (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {number}\n")
        forget()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    if any(flash.installed_version(generation.distribution) for generation in flash.GENERATIONS):
        pytest.skip("a real flash-attn is installed, and a stand-in would have to share its name")
    yield Machine(monkeypatch, tmp_path)
    monkeypatch.undo()
    forget()


def refusal(**changes) -> str | None:
    request = {"strategy": STRATEGIES["anchor"], "device_type": "cuda", "dtype": torch.bfloat16, "head_width": 64}
    return flash.why_not(Request(**(request | changes)))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("strategy", SERVED)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_generation_gives_dense_attention(machine, package, strategy, heads):
    machine.install(package)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, h, 12, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]
    served = replace(STRATEGIES[strategy], window=WINDOW) if STRATEGIES[strategy].window else STRATEGIES[strategy]
    assert refusal(strategy=served) is None

    out = flash.compute(*inputs, Borders.of(torch.tensor(DOCUMENTS)), served)
    expected = dense_attention(*inputs, strategy, DOCUMENTS, window=WINDOW)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_backward_is_deterministic_when_torch_is_asked_for_that(machine, package):
    machine.install(package)
    q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    borders = Borders.of(torch.tensor([[0, 1, 1, 2, 2]]))
    flash.compute(q, k, v, borders, STRATEGIES["anchor"])
    torch.use_deterministic_algorithms(True)
    try:
        flash.compute(q, k, v, borders, STRATEGIES["anchor"])
    finally:
        torch.use_deterministic_algorithms(False)
    module = PACKAGES[package][2].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert sys.modules[module].deterministic_seen == [False, True]


@pytest.mark.parametrize(
    ("capability", "width", "installed", "used"),
    [
        (HOPPER, 64, ("2.8.3", "3", "4"), "flash-attn-3 3.0.0"),
        (HOPPER, 256, ("2.8.3", "3", "4"), "flash-attn-3 3.0.0"),
        (HOPPER, 64, ("2.8.3", "4"), "flash-attn-4 4.0.0b27"),
        (HOPPER, 192, ("2.8.3", "4"), "flash-attn 2.8.3+cu12torch2.8"),
        (HOPPER, 64, ("2.8.3",), "flash-attn 2.8.3+cu12torch2.8"),
        (AMPERE, 64, ("2.8.3", "3", "4"), "flash-attn 2.8.3+cu12torch2.8"),
        (BLACKWELL, 128, ("2.8.3", "3", "4"), "flash-attn-4 4.0.0b27"),
        (BLACKWELL, 256, ("2.8.3", "3", "4"), "flash-attn 2.8.3+cu12torch2.8"),
        (CONSUMER, 64, ("2.8.3", "3", "4"), "flash-attn 2.8.3+cu12torch2.8"),
        (AMPERE, 64, ("2.7.0",), "flash-attn 2.7.0"),
    ],
)
def test_the_card_and_the_head_width_decide_the_generation(machine, capability, width, installed, used):
    machine.install(*installed)
    machine.card(capability)
    assert refusal(head_width=width) is None
    assert flash.in_use(head_width=width) == used


def test_a_generation_without_a_deterministic_backward_gives_way(machine):
    machine.install("2.8.3", "3")
    torch.use_deterministic_algorithms(True)
    try:
        assert flash.in_use(head_width=192).startswith("flash-attn-3")
        assert flash.in_use(head_width=256).startswith("flash-attn 2")
    finally:
        torch.use_deterministic_algorithms(False)
    assert flash.in_use(head_width=256).startswith("flash-attn-3")


def test_a_broken_generation_gives_way_to_the_next(machine):
    machine.install("2.8.3")
    machine.install("3", body="raise ImportError('undefined symbol: _ZN3c10')")
    assert refusal() is None
    assert flash.in_use(head_width=64).startswith("flash-attn 2")


@pytest.mark.parametrize(
    ("capability", "width", "package", "version", "reasons"),
    [
        (AMPERE, 64, "2.7.0", "2.6.3", ["flash-attn 2.6.3 is installed", "needs 2.7.0 or newer", "pip install -U"]),
        (CONSUMER, 64, "2.7.0", None, ["flash-attn 2.7.0 is installed", "capability 12.0 needs 2.7.3 or newer"]),
        (BLACKWELL, 64, "4", "4.0.0b12", ["flash-attn-4 4.0.0b12 is installed", "needs 4.0.0b13 or newer"]),
        (AMPERE, 64, "3", None, ["3.0.0 is not used on cards of compute capability 8.6", "flash-attn, which serves"]),
        (BLACKWELL, 192, "4", None, ["4.0.0b27 takes heads up to 128 wide, not 192", "pip install flash-attn "]),
    ],
)
def test_what_is_installed_and_cannot_serve_says_why(machine, capability, width, package, version, reasons):
    machine.install(package, version=version)
    machine.card(capability)
    sentence = refusal(head_width=width)
    assert sentence is not None
    assert sentence.endswith(".")
    for reason in reasons:
        assert reason in sentence


def test_a_package_that_does_not_import_says_so(machine):
    machine.install("2.8.3", body="raise ImportError('undefined symbol: _ZN3c10')")
    sentence = refusal()
    assert "fails to import (ImportError: undefined symbol: _ZN3c10)" in sentence
    assert "pip install --force-reinstall --no-deps --no-build-isolation flash-attn." in sentence


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "The flash kernel runs on cuda, not on cpu."),
        ({"dtype": torch.float32}, "torch.float32, as trainer.precision='32-true' or rotary.precision="),
        ({"head_width": 20}, "multiple of 8 up to 256, not 20."),
        ({"strategy": STRATEGIES["sink_window"]}, "attention.strategy='sink_window' keeps in sight."),
    ],
)
def test_refusals_are_sentences(machine, changes, reason):
    machine.install("2.8.3")
    sentence = refusal(**changes)
    assert sentence is not None
    assert reason in sentence
    assert sentence.endswith(".")
    assert refusal() is None


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_not_installed_says_how_to_install(machine, device_type):
    forget()
    sentence = refusal(device_type=device_type)
    assert "flash-attn, which is not installed: pip install flash-attn --no-build-isolation" in sentence
    assert "workbench[flash]" in sentence


def test_nothing_is_imported_before_it_is_used(machine):
    """Neither by the kernel's module nor where the device rules the kernel out."""
    machine.install("2.8.3", "3", "4", body="raise SystemExit('imported')")
    program = (
        "import torch; from modules.attention import flash; from modules.attention.capabilities import Request; "
        "from modules.attention.strategies import STRATEGIES; "
        "request = Request(strategy=STRATEGIES['full'], device_type='cpu', dtype=torch.bfloat16, head_width=64); "
        "print(flash.why_not(request))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{machine.folder}:{Path(flash.__file__).parents[2]}", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "The flash kernel runs on cuda, not on cpu.\n"
