"""References between settings: `model.max_positions: ${data.context_length}`.

A reference names another setting and nothing else. OmegaConf's resolvers (`${oc.env:TOKEN}`) would write what the
environment keeps secret into configs, logs and MLflow, so they are refused.
"""

import re
from collections.abc import Callable
from typing import Any

REFERENCE = re.compile(r"\$\{([^{}]*)\}")


class ReferenceMistake(ValueError):
    """A reference that leads nowhere; the message goes on from 'key=value '."""


def is_reference(value: Any) -> bool:
    """Whether a value is, or holds, a reference."""
    return isinstance(value, str) and "${" in value


def follow(text: str, value_of: Callable[[str], Any], *, start: str) -> Any:
    """The value behind a reference, with its type; where text surrounds it, that text with the value inside.

    Args:
        text: for example '${data.context_length}' or 'run-${seed}'.
        value_of: a setting's value, which may be a reference again.
        start: the setting that holds `text`.
    Raises:
        ReferenceMistake: it leads back to itself, or is no reference to a setting.
    """
    return _follow(text, value_of, (start,))


def _follow(text: str, value_of: Callable[[str], Any], path: tuple[str, ...]) -> Any:
    def behind(match: re.Match[str]) -> Any:
        key = match[1].strip()
        if not re.fullmatch(r"[\w.-]+", key):
            raise ReferenceMistake(
                "refers to no setting. Write ${section.setting}; resolvers such as oc.env are refused."
            )
        if key in path:
            raise ReferenceMistake(f"leads back to itself: {' -> '.join([*path, key])}. Write one of them as a value.")
        value = value_of(key)
        return _follow(value, value_of, (*path, key)) if is_reference(value) else value

    if whole := REFERENCE.fullmatch(text):
        return behind(whole)
    filled = REFERENCE.sub(lambda match: str(behind(match)), text)
    if "${" in filled:
        raise ReferenceMistake("has a ${ without its }.")
    return filled
