"""`when` of a sweep file: compares a cell's values with literals. It never evaluates code.

{data.context_length: 512}            equal
{data.context_length: [512, 1024]}    any of
{data.context_length: ">=8192"}       one comparison: >= <= != > <
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def matches(when: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether every condition holds; `values` has each of its keys."""
    return all(_compares(values[key], condition) for key, condition in when.items())


def _compares(value: Any, condition: Any) -> bool:
    if isinstance(condition, list):
        return any(_compares(value, item) for item in condition)
    if isinstance(condition, str):
        match = re.fullmatch(r"(>=|<=|!=|>|<)\s*(.+)", condition)
        if match:
            try:
                return COMPARISONS[match[1]](float(value), float(match[2]))
            except (TypeError, ValueError):
                return match[1] == "!=" and str(value) != match[2]
    return bool(value == condition) and isinstance(value, bool) == isinstance(condition, bool)
