"""Interrupts (Ctrl-C) amid what has to come to its end."""

from __future__ import annotations

from collections.abc import Callable


def to_the_end(clean: Callable[[], object]) -> None:
    """Call what cleans up; if an interrupt ends it, call it again before the interrupt is raised."""
    try:
        clean()
    except KeyboardInterrupt:
        clean()
        raise


def raise_interrupt(error: BaseException, handled: BaseException | None) -> None:
    """Raise the interrupt amid which the library raised `error`, if there is one besides `handled`.

    An interrupt between two statements of the library makes it close a file twice, say, or release a free lock.
    """
    if isinstance(error.__context__, KeyboardInterrupt) and error.__context__ is not handled:
        raise error.__context__
