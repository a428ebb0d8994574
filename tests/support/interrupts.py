"""A Ctrl-C at any call of this thread that changes files."""

import builtins
import contextlib
import fcntl
import os
import threading
from unittest import mock

_CHANGES = [
    (os, name)
    for name in ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "symlink", "chmod", "utime")
    + ("pwritev", "write", "ftruncate", "truncate", "fsync", "close", "copy_file_range", "sendfile")
]


@contextlib.contextmanager
def interrupted(number, *, after):
    """Interrupt this thread at its `number`-th change, before or `after` it is made; yields a list of all changes."""
    thread, calls = threading.get_ident(), []

    def interrupting(function, changes=lambda *_, **__: True):
        def call(*args, **kwargs):
            if threading.get_ident() != thread or not changes(*args, **kwargs):
                return function(*args, **kwargs)
            calls.append(f"{function.__name__} {args[0]}")
            if len(calls) != number:
                return function(*args, **kwargs)
            if after and hasattr(made := function(*args, **kwargs), "close"):
                made.close()
            raise KeyboardInterrupt

        return call

    def opens_to_write(_, flags, *__, **___):
        return bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))

    def writes(_, mode="r", *__, **___):
        return mode[:1] in "wax"

    with contextlib.ExitStack() as stack:
        for owner, name in _CHANGES:
            stack.enter_context(mock.patch.object(owner, name, interrupting(getattr(owner, name))))
        stack.enter_context(mock.patch.object(os, "open", interrupting(os.open, opens_to_write)))
        stack.enter_context(mock.patch.object(builtins, "open", interrupting(builtins.open, writes)))
        stack.enter_context(mock.patch.object(fcntl, "flock", interrupting(fcntl.flock)))
        yield calls
