"""A terminal that a command writes to."""

import io
import re


class Terminal(io.StringIO):
    """Remembers what it shows. Its width is that of the environment."""

    def isatty(self):
        return True

    @property
    def lines(self):
        """What is on the screen, without colours."""
        return [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", self.getvalue()).splitlines()]


def terminal(monkeypatch, columns, stream=None):
    """Returns a terminal of so many columns, which is `sys.stdout` or `sys.stderr` if `stream` says so."""
    for name, value in {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    shown = Terminal()
    if stream is not None:
        monkeypatch.setattr(f"sys.{stream}", shown)
    return shown
