"""How far a command is, on stderr. Nothing of JAX or Orbax is imported, so that a bar is there at once."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from orbax_safetensors.cli.messages import Messages
from orbax_safetensors.transfer.progress_bar import Bar


class Reporter(Bar):
    """A bar with the messages of the package above it."""

    def __enter__(self) -> Self:
        self._messages = Messages(self.say)
        self._messages.__enter__()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._messages.__exit__()
        super().__exit__(kind, error, traceback)
