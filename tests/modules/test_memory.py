"""The count of activations against what autograd really keeps, caught by torch's own hooks."""

from dataclasses import replace

import pytest
import torch

from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from modules.llama import Llama, LlamaConfig, parameter_count
from modules.memory import training_memory
from modules.rotary import RotaryConfig

SHAPE = LlamaConfig(
    vocabulary_size=300, width=64, layers=4, heads=4, kv_heads=2, head_width=16, hidden_width=128,
    norm_epsilon=1e-5, tied_embeddings=True, rope_theta=1e4, max_positions=4096,
)  # fmt: skip
TOKENS = 512


def kept_bytes(shape, dtype):
    model = Llama(shape, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig()).to(dtype)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # the tensor too, so that no address is used twice
        return tensor

    borders = Borders.of(torch.ones(1, TOKENS, dtype=torch.int32))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(1, TOKENS, dtype=torch.int64), torch.arange(TOKENS)[None], borders)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16)])
@pytest.mark.parametrize(
    "changes", [{}, {"layers": 2}, {"hidden_width": 256}, {"kv_heads": 4}, {"width": 128, "head_width": 32}]
)
def test_activations_are_what_autograd_keeps(precision, dtype, changes):
    shape = replace(SHAPE, **changes)
    counted = training_memory(shape, tokens=TOKENS, precision=precision).activations
    assert counted == pytest.approx(kept_bytes(shape, dtype), rel=0.1)


@pytest.mark.parametrize(
    ("precision", "has_master_weights", "bytes_per_parameter"),
    [
        ("32-true", False, (4, 4, 8)),
        ("64-true", False, (8, 8, 16)),
        ("bf16-true", True, (2, 2, 12)),
        ("bf16-true", False, (2, 2, 4)),
        ("bf16-mixed", False, (6, 4, 8)),
    ],
)
def test_bytes_per_parameter(precision, has_master_weights, bytes_per_parameter):
    memory = training_memory(SHAPE, tokens=8, precision=precision, has_master_weights=has_master_weights)
    found = (memory.weights, memory.gradients, memory.optimizer)
    assert found == tuple(count * parameter_count(SHAPE) for count in bytes_per_parameter)


def test_checkpointing_keeps_one_layer_and_the_layers_inputs():
    deep = replace(SHAPE, layers=32)
    memory = training_memory(deep, tokens=TOKENS, precision="32-true")
    assert memory.activations_checkpointed < memory.activations / 10
