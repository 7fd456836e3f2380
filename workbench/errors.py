"""A mistake of the user's, and the edge where library errors become one. Imports nothing heavy."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """What a user wrote cannot work. The message says where, what and the way out; the program exits with 2."""


@contextmanager
def user_input(what: str = "") -> Iterator[None]:
    """Turns the ValueError or OSError that reading a user's input raises into a UserError."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(f"{what}: {error}" if what else str(error)) from error
