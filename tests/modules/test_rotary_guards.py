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
from torch.utils.data import DataLoader

from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from modules.batch import PackedBatch
from modules.language_model import LanguageModel
from modules.llama import Llama, LlamaConfig
from modules.optim import OptimizerConfig
from modules.rotary import RotaryConfig, rotary_tables
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
    module = LanguageModel(build(name), optimizer=OptimizerConfig(), max_steps=2, anchor_id=None)
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


@every_scaling
def test_a_lower_precision_of_matrix_products(name: str) -> None:
    model = build(name)
    expected, digest = handed_to_layers(model), model.frequency_digest()
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert_same(handed_to_layers(model), expected)
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
    """Nor the other way round: what a model met before is not in its tables."""
    short, long = torch.arange(100)[None], torch.arange(longer - 99, longer + 1)[None]
    met_short_only, met_long_only = handed_to_layers(build(name), short), handed_to_layers(build(name), long)
    model = build(name)
    for position_BT, expected in ((short, met_short_only), (long, met_long_only), (short, met_short_only)):
        assert_same(handed_to_layers(model, position_BT), expected)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_the_longest_sequence_of_a_batch_decides_for_the_batch(name: str) -> None:
    """As in transformers, which takes the largest position of the batch."""
    rows = torch.stack((torch.arange(100), torch.arange(600, 700)))
    together, short = handed_to_layers(build(name), rows), handed_to_layers(build(name), rows[:1])
    assert_same((together[0][1:], together[1][1:]), handed_to_layers(build(name), rows[1:]))
    assert not torch.equal(together[0][:1], short[0])


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
