"""Functions that torch.compile leaves to Python: a graph ends before the call and another begins after it.

For what would become a constant of the graph and is different in every batch, and for what rounds where a setting says
so: a graph's own code drops roundings between operations that it fuses.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def opaque(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function of a module. What it compiles by itself is still compiled.

    `torch.compiler.disable` does the same, but loads torch's compiler, which takes two seconds, where it decorates;
    this loads it where something is compiled.
    """

    @wraps(function)
    def call(*args: Arguments.args, **settings: Arguments.kwargs) -> Result:
        # A constant True to torch.compile, which imports at once what it meets on its way; False where Python runs it.
        if torch.compiler.is_dynamo_compiling():
            from modules.opaque_call import call_in_python

            return call_in_python(function, *args, **settings)
        return function(*args, **settings)

    return call
