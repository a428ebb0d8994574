"""Interrupts (Ctrl-C) amid what has to come to its end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


def to_the_end(clean: Callable[[], object]) -> None:
    """Call what cleans up; if an interrupt ends it, call it again before the interrupt is raised."""
    try:
        clean()
    except KeyboardInterrupt:
        clean()
        raise


@contextlib.contextmanager
def plain_interrupts() -> Iterator[None]:
    """Raise an interrupt of the block as what it is.

    One between two statements of Python's library can become an error there: a lock that is free is released, say, or
    a file closed twice.
    """
    handled = sys.exception()
    try:
        yield
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt) and error.__context__ is not handled:
            raise error.__context__ from None
        raise
