"""A checkpoint that another one replaces at any call by which a reader looks at files."""

import contextlib
import os
import threading
from unittest import mock

from orbax_safetensors.storage.replace import replace

# All by which a path is looked at; what is read later comes from files that are open.
_CALLS = ("open", "listdir", "scandir", "stat", "lstat")


@contextlib.contextmanager
def replaced(path, new, number):
    """`new` takes the place of `path` before the `number`-th call that looks at it; yields a list of these calls."""
    path, new = os.fspath(path), os.fspath(new)
    calls, lock = [], threading.RLock()

    def hooked(function):
        def call(at=".", *args, **kwargs):
            text = os.fspath(at) if isinstance(at, str | os.PathLike) else ""
            if text.startswith(path):
                with lock:
                    calls.append((function.__name__, text))
                    if len(calls) == number:
                        replace(new, path)
            return function(at, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in _CALLS:
            stack.enter_context(mock.patch.object(os, name, hooked(getattr(os, name))))
        yield calls
