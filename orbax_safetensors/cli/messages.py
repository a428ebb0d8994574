"""What the package logs, as lines on stderr: its warnings, and what a conversion says when it begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Self

from orbax_safetensors.errors import printable

# The logger of the package: those of its modules are below it.
_LOGGER = logging.getLogger(__package__.partition(".")[0])
# That of `convert.announce`, which is not imported for its name because that imports Orbax.
_ANNOUNCEMENTS = _LOGGER.getChild("convert.announce")


class Messages(logging.Handler):
    """A handler that, while it is entered, passes warnings of the package, and what conversions announce, to `say`.

    No other handler gets them.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        text = printable(record.getMessage())
        if record.levelno >= logging.WARNING:
            self._say(f"{record.levelname.lower()}: {text}")
        elif record.name == _ANNOUNCEMENTS.name:
            self._say(text)

    def __enter__(self) -> Self:
        self._before = _LOGGER.handlers, _LOGGER.propagate, _ANNOUNCEMENTS.level
        _LOGGER.handlers, _LOGGER.propagate = [self], False
        _ANNOUNCEMENTS.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        _LOGGER.handlers, _LOGGER.propagate, level = self._before
        _ANNOUNCEMENTS.setLevel(level)
