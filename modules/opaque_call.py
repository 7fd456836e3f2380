"""The call that `modules.opaque` makes where torch.compile traces it. Loading this loads torch's compiler."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@torch.compiler.disable(reason="left to Python by modules.opaque")
def call_in_python(
    function: Callable[Arguments, Result], /, *args: Arguments.args, **settings: Arguments.kwargs
) -> Result:
    """The function's result; torch.compile traces neither it nor what it calls."""
    return function(*args, **settings)
