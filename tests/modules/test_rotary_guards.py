"""What may happen to a model must not reach its rotary frequencies and angles: every bit of them stays.

The tables are those that the first layer is handed in a forward pass, whatever happened to the model around it.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import modules.llama
from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from modules.batch import PackedBatch
from modules.compilation import why_no_compilation
from modules.language_model import LanguageModel
from modules.llama import Llama, LlamaConfig
from modules.optim import OptimizerConfig
from modules.rotary import RotaryConfig, rotary_tables
from modules.rotary_frequencies import frequencies
from modules.rotary_scaling import NO_SCALING, ScalingConfig

POSITIONS = torch.tensor([[0, 1, 257, 1023, 4097, 65_537, 131_070, 131_071]])
SCALINGS = {
    "default": NO_SCALING,
    "linear": ScalingConfig(rope_type="linear", factor=4.0),
    "ntk": ScalingConfig(rope_type="ntk", factor=4.0),
    "dynamic": ScalingConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=512),
    "yarn": ScalingConfig(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096),
    "llama3": ScalingConfig(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "longrope": ScalingConfig(
        rope_type="longrope", factor=16.0, short_factor=[1.0 + i / 10 for i in range(8)],
        long_factor=[1.0 + 3 * i for i in range(8)], original_max_position_embeddings=512,
    ),
    "partial": ScalingConfig(rope_type="default", partial_rotary_factor=0.5),
}  # fmt: skip
every_scaling = pytest.mark.parametrize("name", SCALINGS)


def build(name: str = "default", precision: str = "float32") -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocabulary_size=97, width=32, layers=2, heads=2, kv_heads=1, head_width=16, hidden_width=48, norm_epsilon=1e-5,
        tied_embeddings=True, rope_theta=5e5, max_positions=131_072, rope_scaling=SCALINGS[name],
    )  # fmt: skip
    rotary = RotaryConfig(precision=precision)  # type: ignore[arg-type]
    return Llama(config, strategy=STRATEGIES["full"], kernel="reference", rotary=rotary)


def last_attention(model: Llama) -> torch.nn.Module:
    return model.get_submodule(f"layers.{len(model.layers) - 1}.self_attn")


def handed_to_layers(model: Llama, position_BT: Tensor = POSITIONS) -> tuple[Tensor, Tensor]:
    """Cosines and sines that the last layer's attention gets."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = last_attention(model).register_forward_pre_hook(lambda _, args: seen.append(tuple(args[1])))
    tokens_BT = torch.arange(position_BT.numel()).reshape(position_BT.shape) % 97
    try:
        model(tokens_BT, position_BT, Borders.of(torch.ones_like(tokens_BT, dtype=torch.int32)))
    finally:
        handle.remove()
    return seen[0]


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@every_scaling
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_the_module(name: str, dtype: torch.dtype) -> None:
    model = build(name)
    expected, digest = handed_to_layers(model), model.frequency_digest()
    assert expected[0].dtype == torch.float32
    model.to(dtype)
    assert_same(handed_to_layers(model), expected)
    assert model.frequency_digest() == digest
    # From float32 tables, rounded, and not from rounded frequencies.
    low = build(name, "compute").to(dtype)
    assert_same(handed_to_layers(low), (expected[0].to(dtype), expected[1].to(dtype)))
    model.double().float()
    assert_same(handed_to_layers(model), expected)


@pytest.mark.parametrize("name", ["default", "yarn", "longrope"])
def test_training_in_bf16_true(name: str, tmp_path: Path) -> None:
    """A real Trainer, whose plugin casts the module and changes the default dtype inside every step."""
    expected, digest = handed_to_layers(build(name)), build(name).frequency_digest()
    module = LanguageModel(build(name), optimizer=OptimizerConfig(), max_steps=2)
    seen: list[tuple[Tensor, Tensor]] = []
    module.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(tuple(args[1])))
    tokens_BT = torch.arange(POSITIONS.numel())[None]
    batch = PackedBatch(
        tokens_BT=tokens_BT, labels_BT=tokens_BT, document_BT=torch.ones_like(tokens_BT, dtype=torch.int32),
        position_BT=POSITIONS,
    )  # fmt: skip
    trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-true", max_steps=2, logger=False, default_root_dir=tmp_path,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([batch, batch], batch_size=None))  # type: ignore[arg-type]
    assert module.model.embed_tokens.weight.dtype == torch.bfloat16 and len(seen) == 2
    for tables in seen:
        assert_same(tables, expected)
    assert module.model.frequency_digest() == digest


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[Any]:
    """A process group of this process alone."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@every_scaling
def test_sharding_that_casts_inputs(name: str, one_process: Any) -> None:
    """FSDP casts all floating inputs of the model and of every layer to bfloat16, but neither positions nor tables."""
    expected = handed_to_layers(build(name))
    model = build(name)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    for layer in model.layers:
        fully_shard(layer, mesh=one_process, mp_policy=policy)
    fully_shard(model, mesh=one_process, mp_policy=policy)
    hidden: list[torch.dtype] = []
    last_attention(model).register_forward_pre_hook(lambda _, args: hidden.append(args[0].dtype))
    assert_same(handed_to_layers(model), expected)
    assert hidden == [torch.bfloat16]


class Operations(TorchDispatchMode):
    """Writes down the names of all that torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul", "einsum"}


@every_scaling
@pytest.mark.parametrize("precision", ["float32_scores", "float32", "compute", "low_positions"])
def test_a_lower_precision_of_matrix_products(name: str, precision: str) -> None:
    """Which has no effect on bits here, and could have none anywhere: no matrix product takes part."""
    model = build(name, precision)
    positions = torch.arange(120_000, 124_096)[None]
    with Operations() as made:
        expected = tuple(model.rotary_tables(positions, torch.float32))
    assert "mul" in made.names and not made.names & PRODUCTS
    handed, digest = handed_to_layers(model), model.frequency_digest()
    before = torch.get_float32_matmul_precision()
    try:
        for setting in ("high", "medium"):
            torch.set_float32_matmul_precision(setting)
            assert_same(tuple(model.rotary_tables(positions, torch.float32)), expected)
            assert_same(handed_to_layers(model), handed)
            assert model.frequency_digest() == digest
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@every_scaling
def test_on_a_gpu_with_tensor_float_32(name: str) -> None:
    """TF32 keeps integers to 2048 only: angles must not be made by a matrix product there."""
    model = build(name)
    exact = model.rotary_tables(POSITIONS, torch.float64)
    before = torch.get_float32_matmul_precision()
    model.cuda()
    expected = handed_to_layers_on(model, "cuda")
    try:
        torch.set_float32_matmul_precision("high")
        got = handed_to_layers_on(model, "cuda")
    finally:
        torch.set_float32_matmul_precision(before)
    assert_same(got, expected)
    factor = model.frequencies().attention_factor
    assert (got[0].cpu().double() - exact.cos_BTD).abs().max() < 2e-2 * factor


def handed_to_layers_on(model: Llama, device: str) -> tuple[Tensor, Tensor]:
    with torch.device(device):
        return handed_to_layers(model, POSITIONS.to(device))


@every_scaling
@pytest.mark.parametrize("longer", [511, 513, 131_071])
def test_a_longer_sequence_changes_no_shorter_one(name: str, longer: int) -> None:
    """Nor the other way round: what a model, or another one of this process, met before is not in its tables."""
    short, long = torch.arange(100)[None], torch.arange(longer - 99, longer + 1)[None]
    model = build(name)
    for position_BT in (short, long, short, long, short):
        assert_same(handed_to_layers(model, position_BT), by_hand(name, position_BT, position_BT.max().item() + 1))
    if name in ("dynamic", "longrope"):
        changes = not torch.equal(by_hand(name, short, 100)[0], by_hand(name, short, longer + 1)[0])
        assert changes == (longer + 1 > 512)


def by_hand(name: str, position_BT: Tensor, length: float) -> tuple[Tensor, Tensor]:
    """From the frequencies of that length."""
    inverse_P, factor = frequencies(head_width=16, theta=5e5, scaling=SCALINGS[name], length=int(length))
    angle_BTP = position_BT.float()[..., None] * inverse_P
    angle_BTD = torch.cat((angle_BTP, angle_BTP), dim=-1)
    return angle_BTD.cos() * factor, angle_BTD.sin() * factor


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_the_longest_sequence_of_a_batch_decides_for_the_batch(name: str) -> None:
    """As in transformers, which takes the largest position of the batch."""
    rows = torch.stack((torch.arange(100), torch.arange(600, 700)))
    assert_same(handed_to_layers(build(name), rows), by_hand(name, rows, 700))
    assert not torch.equal(by_hand(name, rows, 700)[0][0], by_hand(name, rows[:1], 100)[0][0])


@every_scaling
def test_reloading(name: str, tmp_path: Path) -> None:
    """State holds nothing rotary, so no checkpoint can bring rounded frequencies back."""
    model = build(name)
    expected, digest = handed_to_layers(model), model.frequency_digest()
    state = model.bfloat16().state_dict()
    assert set(state) == {key for key, _ in model.named_parameters()} and not list(model.buffers())
    torch.save(state, tmp_path / "model.ckpt")
    again = build(name).bfloat16()
    again.load_state_dict(torch.load(tmp_path / "model.ckpt", weights_only=True), strict=True)
    assert_same(handed_to_layers(again), expected)
    assert again.frequency_digest() == digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e7])
@pytest.mark.parametrize("width", [64, 80, 96, 128])
def test_the_cosine_far_out_is_the_true_one(width: int, theta: float, dtype: torch.dtype) -> None:
    """The angle rounds by up to 2^-8 there, and its frequency's 1 to 3 roundings of 2^-24 grow with the position."""
    position = torch.arange(131_072 - 512, 131_072)
    made = rotary_tables(
        position[None], config=RotaryConfig(precision="float32"), head_width=width, theta=theta, compute_dtype=dtype
    )
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    angle = position.double()[:, None] * torch.tensor([math.pow(theta, -e) for e in exponent.tolist()]).double()
    angle = torch.cat((angle, angle), dim=1)
    assert (made.cos_BTD[0].double() - angle.cos()).abs().max() < 2e-2
    assert (made.sin_BTD[0].double() - angle.sin()).abs().max() < 2e-2


@every_scaling
@pytest.mark.parametrize("theta", [1e4, 5e5, 2.5e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_far_out_under_every_scaling(name: str, theta: float, dtype: torch.dtype) -> None:
    """Against the same scaling's frequencies in float64, which other tests hold to transformers."""
    scaling = SCALINGS[name]
    position_BT = torch.arange(131_072 - 64, 131_072)[None]
    made = rotary_tables(
        position_BT, config=RotaryConfig(precision="float32"), head_width=16, theta=theta, compute_dtype=dtype,
        scaling=scaling,
    )  # fmt: skip
    exact = frequencies(head_width=16, theta=theta, scaling=scaling, length=131_072, dtype=torch.float64)
    angle_BTP = position_BT.double()[..., None] * exact.inverse_P
    for ours, right in ((made.cos_BTD, angle_BTP.cos()), (made.sin_BTD, angle_BTP.sin())):
        right = torch.cat((right, right), dim=-1) * exact.attention_factor
        assert ours.dtype == torch.float32
        assert (ours - right).abs().max() < 2e-2 * exact.attention_factor


@pytest.mark.parametrize(
    ("name", "dtype"), [("default", torch.float32), ("yarn", torch.bfloat16), ("longrope", torch.bfloat16)]
)
def test_inside_a_compiled_model(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are made by Python, not by compiled code, whatever the backend does to the rest."""
    torch.compiler.reset()
    made: list[tuple[Tensor, Tensor]] = []
    in_python: list[bool] = []
    real = modules.llama.rotary_tables

    def spy(*args: Any, **settings: Any) -> Any:
        tables = real(*args, **settings)
        made.append(tuple(tables))
        in_python.append(not torch.compiler.is_compiling())
        return tables

    monkeypatch.setattr(modules.llama, "rotary_tables", spy)
    model = build(name).to(dtype)
    expected = handed_to_layers(model)
    model.compile(backend="eager")
    tokens_BT = torch.arange(POSITIONS.numel())[None]
    for _ in range(2):
        model(tokens_BT, POSITIONS, Borders.of(torch.ones_like(tokens_BT, dtype=torch.int32)))
    assert len(made) == 3 and all(in_python)
    for tables in made:
        assert_same(tables, expected)


@pytest.mark.slow
@pytest.mark.skipif(why_no_compilation("cpu") is not None, reason=str(why_no_compilation("cpu")))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inside_a_model_that_was_translated(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own backend: what the layers multiply with has the bits of an uncompiled model."""
    torch.compiler.reset()
    made: list[tuple[Tensor, Tensor]] = []
    real = modules.llama.rotary_tables
    monkeypatch.setattr(
        modules.llama, "rotary_tables", lambda *args, **settings: made.append(x := real(*args, **settings)) or x
    )
    for name in ("default", "yarn", "longrope"):
        model = build(name).to(dtype)
        expected = handed_to_layers(model)
        model.compile()
        tokens_BT = torch.arange(POSITIONS.numel())[None]
        model(tokens_BT, POSITIONS, Borders.of(torch.ones_like(tokens_BT, dtype=torch.int32))).sum().backward()
        assert_same(tuple(made[-1]), expected)
