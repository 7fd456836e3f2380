"""The dtype foretold is the one a linear layer returns."""

import pytest
import torch
from torch.nn import functional as F

from modules.autocast import product_dtype, without_autocast


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("enabled", [False, True])
def test_product_dtype_is_what_linear_returns(enabled: bool, dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        assert product_dtype(x) == F.linear(x, x).dtype
        with without_autocast(x):
            assert product_dtype(x) == F.linear(x, x).dtype == dtype


def test_the_meta_device_has_no_autocast() -> None:
    x = torch.ones(2, device="meta")
    with without_autocast(x):
        assert product_dtype(x) == torch.float32
