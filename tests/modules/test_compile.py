"""torch.compile of the Llama: one set of graphs for all documents and layers, results as exact as eager ones."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modules.llama
from modules.attention.attend import attend
from modules.attention.borders import Borders
from modules.attention.capabilities import KERNELS, can_serve
from modules.attention.strategies import STRATEGIES
from modules.llama import Llama, LlamaConfig
from modules.opaque import opaque
from modules.rotary import RotaryConfig, RotaryTables, rotary_tables

VOCABULARY, ROWS, TOKENS = 97, 2, 144
POLICIES = ("float32_scores", "float32", "compute", "low_positions")

needs_a_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler, and g++ is not found"
)
cuda = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")],
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """What earlier tests compiled counts against the limit of versions that torch keeps of a function."""
    torch.compiler.reset()


def build(
    strategy: str = "anchor", *, kernel: str = "sdpa", precision: str = "float32", layers: int = 2, device: str = "cpu"
) -> Llama:
    config = LlamaConfig(
        vocabulary_size=VOCABULARY, width=64, layers=layers, heads=4, kv_heads=2, head_width=16, hidden_width=96,
        norm_epsilon=1e-5, tied_embeddings=False, rope_theta=1e4, max_positions=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    rotary = RotaryConfig(precision=precision)  # type: ignore[arg-type]
    model = Llama(config, strategy=STRATEGIES[strategy], kernel=kernel, rotary=rotary)
    for parameter in model.parameters():  # scores and logits of about 1
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.15)
    return model.to(device)


def batches(anchor: bool, device: str = "cpu") -> Iterator[tuple[Tensor, Tensor, Borders]]:
    """Ever other tokens, and 1, 2, 3, ... documents that end anywhere. Positions beyond what bfloat16 tells apart."""
    random = torch.Generator().manual_seed(0)
    position_BT = torch.arange(1000, 1000 + TOKENS).repeat(ROWS, 1)
    documents = 0
    while True:
        documents += 1
        document_BT = torch.ones(ROWS, TOKENS, dtype=torch.int32)
        for row in document_BT:
            for end in torch.randperm(TOKENS - 2, generator=random)[: documents - 1]:
                row[end + 2 :] += 1
        if anchor:
            document_BT[:, 0] = 0
        if documents % 3 == 0:
            document_BT[0, -5:] = -1
        tokens_BT = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=random)
        yield tokens_BT.to(device), position_BT.to(device), Borders.of(document_BT.to(device))


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize(
    ("strategy", "kernel", "precision", "autocast"),
    [
        ("anchor", "sdpa", "float32", False),
        ("full", "sdpa", "float32_scores", True),
        ("intra_document_reset", "sdpa", "compute", True),
        ("sink_window", "reference", "low_positions", False),
    ],
)
def test_neither_new_documents_nor_more_layers_compile_anything(
    strategy: str, kernel: str, precision: str, autocast: bool
) -> None:
    """Ten layers: torch gives up on a function after compiling it eight times."""
    graphs = []
    for layers in (1, 10):
        torch.compiler.reset()
        backend = Counting()
        model = build(strategy, kernel=kernel, precision=precision, layers=layers)
        compiled = torch.compile(model, backend=backend)
        seen = []
        for batch in islice(batches(STRATEGIES[strategy].anchor), 10):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                got = compiled(*batch)
                expected = model(*batch)
            got.sum().backward()
            assert torch.equal(got, expected)
            seen.append(backend.graphs)
        assert seen == [seen[0]] * 10
        graphs.append(seen[0])
    # Around attention in a layer, the rest of it, and what stands before and after the layers.
    assert graphs[0] == graphs[1] <= 8


def test_neither_documents_nor_layers_compile_anything_in_evaluation() -> None:
    backend = Counting()
    model = build(layers=10)
    compiled = torch.compile(model, backend=backend)
    seen = []
    for batch in islice(batches(anchor=True), 10):
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert torch.equal(compiled(*batch), model(*batch))
        seen.append(backend.graphs)
    assert seen == [seen[0]] * 10


def test_any_model_may_call_attend_compiled() -> None:
    """Not only ours: documents stay out of the graphs of whatever calls `attend`."""
    backend = Counting()

    @torch.compile(backend=backend)
    def between(x_BHTD: Tensor, borders: Borders) -> Tensor:
        return attend(2 * x_BHTD, x_BHTD, x_BHTD, borders, STRATEGIES["anchor"]) + 1

    x_BHTD = torch.randn(ROWS, TOKENS, 2, 8).transpose(1, 2)  # as projections lay them out
    for _, _, borders in islice(batches(anchor=True), 10):
        expected = attend(2 * x_BHTD, x_BHTD, x_BHTD, borders, STRATEGIES["anchor"]) + 1
        assert torch.equal(between(x_BHTD, borders), expected)
    assert backend.graphs == 2


def test_what_is_compiled_inside_an_opaque_function_stays_compiled() -> None:
    """As the flex kernel is, inside `attend` inside a compiled model."""
    inner, outer = Counting(), Counting()
    ran_in_python = []
    program = torch.compile(lambda x: x.sin() + 1, backend=inner)

    def middle(x: Tensor, borders: Borders) -> Tensor:
        ran_in_python.append(not torch.compiler.is_compiling())
        return program(x) * len(borders.runs)

    hidden = opaque(middle)
    compiled = torch.compile(lambda x, borders: hidden(2 * x, borders) - 1, backend=outer)
    x = torch.randn(5)
    for _, _, borders in islice(batches(anchor=True), 10):
        torch.testing.assert_close(compiled(x, borders), ((2 * x).sin() + 1) * len(borders.runs) - 1)
    assert ran_in_python == [True] * 10
    assert (inner.graphs, outer.graphs) == (1, 2)


def test_a_training_step_without_compilation_loads_no_compiler() -> None:
    """It takes longer to load than all else that a short run adds to its training."""
    program = """
import sys, torch
from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from modules.llama import Llama, LlamaConfig
from modules.loss import cross_entropy_sum
from modules.rotary import RotaryConfig
config = LlamaConfig(vocabulary_size=9, width=8, layers=1, heads=2, kv_heads=1, head_width=4, hidden_width=8,
                     norm_epsilon=1e-5, tied_embeddings=False, rope_theta=1e4, max_positions=9)
for precision in ("float32", "compute"):
    model = Llama(config, strategy=STRATEGIES["anchor"], kernel="sdpa", rotary=RotaryConfig(precision=precision))
    tokens = torch.tensor([[0, 1, 2, 3, 4]])
    hidden = model(tokens, torch.arange(5)[None], Borders.of(torch.tensor([[0, 1, 1, 2, 2]])))
    cross_entropy_sum(hidden, model.head_weight_VE, tokens)[0].backward()
assert model.embed_tokens.weight.grad.any()
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def errors(run: Callable[..., Tensor], model: Llama, batch: Any, exact: list[Tensor], autocast: bool) -> list[float]:
    """Largest error of the logits, and of every gradient relative to the largest gradient of its parameter."""
    model.zero_grad()
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=autocast):
        out = model.logits(run(*batch))
    out.double().square().mean().backward()
    got = [out.detach(), *(p.grad for p in model.parameters())]
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, exact, strict=True)]


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("device", ["cpu", cuda])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("precision", POLICIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_errs_at_most_twice_as_much_as_eager(kernel: str, precision: str, autocast: bool, device: str) -> None:
    """Both against the same weights in float64, where the policy rounds nothing but the positions it is asked to."""
    scores = torch.bfloat16 if autocast and precision != "float32_scores" else torch.float32
    asked = {"strategy": STRATEGIES["anchor"], "device_type": device, "dtype": scores, "head_width": 16}
    if (reason := can_serve(kernel, **asked)) is not None:
        pytest.skip(reason)
    model = build(kernel=kernel, precision=precision, device=device)
    compiled = torch.compile(model)
    wide = deepcopy(model).double()
    for layer in wide.layers:
        layer.self_attn.kernel = "reference"
    compiled_errors, eager_errors = [], []
    for batch in islice(batches(anchor=True, device=device), 3):
        tables = exact_tables(batch[1], precision, torch.bfloat16 if autocast else torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modules.llama, "rotary_tables", lambda *_, tables=tables, **__: tables)
            wide.zero_grad()
            out = wide.logits(wide(*batch))
        out.square().mean().backward()
        exact = [out.detach(), *(p.grad for p in wide.parameters())]
        compiled_errors.append(errors(compiled, model, batch, exact, autocast))
        eager_errors.append(errors(model, model, batch, exact, autocast))
    for (name, *_), ours, theirs in zip(
        [("logits",), *model.named_parameters()],
        torch.tensor(compiled_errors).amax(0),
        torch.tensor(eager_errors).amax(0),
        strict=True,
    ):
        assert ours <= 2 * theirs, f"{name}: {ours:.2e} compiled, {theirs:.2e} eager"


def exact_tables(position_BT: Tensor, precision: str, dtype: torch.dtype) -> RotaryTables:
    """In float64; of rounded positions where the policy asks for that."""
    if precision == "low_positions":
        position_BT = position_BT.to(dtype).long()
    config = RotaryConfig(precision="float32")
    return rotary_tables(position_BT, config=config, head_width=16, theta=1e4, compute_dtype=torch.float64)


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("device", ["cpu", cuda])
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_evaluation_on_every_kernel(kernel: str, device: str) -> None:
    """Against the reference kernel, uncompiled. What stands around attention is compiled once for all documents."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    asked = {"strategy": STRATEGIES["anchor"], "device_type": device, "dtype": dtype, "head_width": 16}
    if (reason := can_serve(kernel, **asked, needs_gradient=False)) is not None:
        pytest.skip(reason)
    model = build(kernel=kernel, device=device).to(dtype)
    plain, exact = build(kernel="reference", device=device).to(dtype), build(kernel="reference", device=device).double()
    backend = Counting()
    compiled = torch.compile(model, backend=backend)
    seen, ours, theirs = [], [], []
    for batch in islice(batches(anchor=True, device=device), 10):
        with torch.no_grad():
            real = batch[2].document_BT >= 0
            expected = exact(*batch)[real]
            ours.append(float((compiled(*batch)[real] - expected).abs().max()))
            theirs.append(float((plain(*batch)[real] - expected).abs().max()))
        seen.append(backend.graphs)
    assert max(ours) <= 2 * max(theirs)
    assert seen == [seen[0]] * 10


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("precision", ["float32", "compute"])
def test_graphs_out_of_the_cache_on_disk_compute_the_same(precision: str, tmp_path: Path) -> None:
    """In the second run of a program torch's cache hands back what leaves a graph as a view with wrong shapes."""
    program = f"""
import torch
from torch._dynamo.utils import counters
from tests.modules.test_compile import batches, build
model = build(precision={precision!r})
out = torch.compile(model)(*next(batches(anchor=True)))
out.square().mean().backward()
gradient = model.layers[0].self_attn.v_proj.weight.grad
print(counters["aot_autograd"]["autograd_cache_hit"], out.sum().item(), gradient.sum().item())
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[1].stderr[-2000:]
    first, second = (run.stdout.split() for run in runs)
    assert int(first[0]) == 0 < int(second[0])
    assert first[1:] == second[1:]


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("precision", POLICIES)
def test_compilation_moves_no_rounding_of_the_rotation(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys reach attention with the same bits: the compiler's own code drops roundings on the way.

    One layer's attention in bfloat16, whose projections are the same library calls in both.
    """
    handed: list[tuple[Tensor, Tensor]] = []
    real = modules.llama.attend

    def spy(q_BHTD: Tensor, k_BGTD: Tensor, *others: Any, **settings: Any) -> Tensor:
        handed.append((q_BHTD.detach().clone(), k_BGTD.detach().clone()))
        return real(q_BHTD, k_BGTD, *others, **settings)

    monkeypatch.setattr(modules.llama, "attend", spy)
    model = build(precision=precision).bfloat16()
    attention = model.layers[0].self_attn
    _, position_BT, borders = next(batches(anchor=True))
    hidden_BTE = torch.randn(ROWS, TOKENS, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2))

    def run(position_BT: Tensor) -> Tensor:
        tables = modules.llama._tables(position_BT, hidden_BTE, model.rotary, 16, model.theta)
        return attention(hidden_BTE, tables, borders)

    run(position_BT)
    torch.compile(run)(position_BT)
    (q_BHTD, k_BGTD), compiled = handed
    assert q_BHTD.dtype == (torch.float32 if precision == "float32_scores" else torch.bfloat16)
    tolerance = 2e-6 if precision == "float32_scores" else 0.0  # one multiplication and addition rounded as one
    torch.testing.assert_close(compiled[0], q_BHTD, rtol=0, atol=tolerance)
    torch.testing.assert_close(compiled[1], k_BGTD, rtol=0, atol=tolerance)
