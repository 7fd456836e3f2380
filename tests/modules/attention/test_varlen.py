"""The `varlen` kernel hands torch's function what it documents, in every version, and refuses what it cannot serve.

That the arguments are right, and the real kernel on CUDA: test_varlen_call.py.
"""

import importlib
import inspect
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention import varlen as torch_varlen

from modules.attention import varlen
from modules.attention.borders import Borders
from modules.attention.capabilities import Request
from modules.attention.strategies import STRATEGIES
from modules.attention.varlen_call import layout_of, prepare
from tests.oracles.dense_attention import dense_attention
from tests.oracles.varlen_attention import varlen_attention

DOCUMENTS = [[0, 1, 1, 1, 1, 2, 2, 2, 3, 4, 4, 4], [0, 1, 1, 1, 1, 1, 1, 2, 2, -1, -1, -1]]
SERVED = ("full", "intra_document", "intra_document_reset", "anchor", "sliding_window")
WINDOW = 3


# Signatures as torch documents them; unknown keywords are errors there too.
def torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert query.shape[1] == key.shape[1], "shape (T_q, H, D) and (T_k, H, D)"
    assert (return_aux, scale) == (None, None)
    # "(-1, 0) for causal attention" and windows: both are what the window itself says.
    return varlen_attention(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)


def torch_2_13(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    assert enable_gqa or query.shape[1] == key.shape[1], "Try setting enable_gqa=True for GQA."
    assert (return_aux, scale, seqused_k, block_table, num_splits) == (None,) * 5
    return varlen_attention(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)


@pytest.fixture(params=[torch_2_11, torch_2_13])
def installed(request, monkeypatch):
    """A torch whose `varlen_attn` runs on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(torch_varlen, "varlen_attn", request.param)
        importlib.reload(varlen)
        yield request.param
    importlib.reload(varlen)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("strategy", SERVED)
def test_whatever_torch_is_installed_it_gives_dense_attention(installed, strategy, heads):
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, h, 12, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]
    served = replace(STRATEGIES[strategy], window=WINDOW) if STRATEGIES[strategy].window else STRATEGIES[strategy]
    assert ("enable_gqa" in inspect.signature(installed).parameters) == varlen.takes_shared_heads()

    out = varlen.compute(*inputs, Borders.of(torch.tensor(DOCUMENTS)), served)
    expected = dense_attention(*inputs, strategy, DOCUMENTS, window=WINDOW)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("strategy", SERVED)
def test_the_operator_of_this_torch_takes_the_arguments(strategy, heads):
    """The real one, its schema and its backward; fake tensors have shapes only, so it needs no card."""
    borders = Borders.of(torch.tensor(DOCUMENTS))
    layout = layout_of(borders, STRATEGIES[strategy])
    assert layout is not None
    q, k, v = (torch.randn(2, h, 12, 64, dtype=torch.bfloat16) for h in (heads[0], heads[1], heads[1]))
    call = prepare(q, k, v, layout, STRATEGIES[strategy])
    with FakeTensorMode() as mode:
        tensors = ("q_NHD", "k_MGD", "v_MGD", "cu_seqlens_q", "cu_seqlens_k")
        fake = {name: mode.from_tensor(getattr(call, name)) for name in tensors}
        inputs = [fake[name].requires_grad_() for name in ("q_NHD", "k_MGD", "v_MGD")]
        out = varlen._attend(replace(call, **fake))
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert (out.shape, out.dtype) == (call.q_NHD.shape, torch.bfloat16)
    assert [gradient.shape for gradient in gradients] == [x.shape for x in inputs]


@pytest.fixture
def card(monkeypatch):
    """An A100, as far as torch can tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A100")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return monkeypatch


def refusal(**changes) -> str | None:
    request = {"strategy": STRATEGIES["anchor"], "device_type": "cuda", "dtype": torch.bfloat16, "head_width": 64}
    return varlen.why_not(Request(**(request | changes)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 40, 128, 256])
@pytest.mark.parametrize("strategy", SERVED)
def test_it_serves_an_a100(card, strategy, width, dtype):
    assert refusal(strategy=STRATEGIES[strategy], head_width=width, dtype=dtype) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "runs on cuda, not on cpu."),
        ({"dtype": torch.float32}, "torch.float32, as trainer.precision='32-true' or rotary"),
        ({"dtype": torch.float32}, "Set trainer.precision='bf16-mixed' and rotary.precision='float32'."),
        ({"head_width": 20}, "multiple of 8 up to 256, not 20."),
        ({"head_width": 264}, "multiple of 8 up to 256, not 264."),
        ({"strategy": STRATEGIES["sink_window"]}, "attention.strategy='sink_window' keeps in sight."),
        ({"strategy": replace(STRATEGIES["sink_window"], sink=0)}, "The flex and reference kernels keep them."),
        ({"strategy": replace(STRATEGIES["sink_window"], anchor=False)}, "The flex and reference kernels keep them."),
    ],
)
def test_refusals_are_sentences(card, changes, reason):
    sentence = refusal(**changes)
    assert sentence is not None
    assert reason in sentence
    assert sentence.endswith(".")


def test_refusals_name_everything_that_is_wrong(card):
    sentence = refusal(device_type="cpu", dtype=torch.float32, head_width=20)
    assert all(part in sentence for part in ("not on cpu", "torch.float32", "not 20"))


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        (torch.cuda, "is_available", lambda: False, "torch finds no CUDA device"),
        (torch.cuda, "get_device_capability", lambda device=None: (7, 5), "8.0 or newer, and A100 has 7.5."),
        (torch.version, "hip", "6.4", "NVIDIA cards alone"),
        (torch.backends.cuda, "is_flash_attention_available", lambda: False, "none built in"),
    ],
)
def test_a_machine_that_cannot_is_refused(card, owner, name, value, reason):
    card.setattr(owner, name, value)
    assert reason in refusal()
