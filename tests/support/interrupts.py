"""A Ctrl-C or the end of the process at any call that changes files."""

import builtins
import contextlib
import fcntl
import itertools
import os
import threading
from unittest import mock

_CHANGES = [
    (os, name)
    for name in ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "symlink", "chmod", "utime")
    + ("pwritev", "write", "ftruncate", "truncate", "fsync", "copy_file_range", "sendfile")
]


class CrashError(BaseException):
    """The end of a process, which nobody catches."""


@contextlib.contextmanager
def interrupted(number, *, after):
    """Interrupt this thread at its `number`-th change, before or `after` it is made; yields a list of all changes."""
    thread, calls = threading.get_ident(), []

    def interrupting(function, *args, **kwargs):
        if threading.get_ident() != thread:
            return function(*args, **kwargs)
        calls.append(f"{function.__name__} {args[0]}")
        if len(calls) != number:
            return function(*args, **kwargs)
        if after and hasattr(made := function(*args, **kwargs), "close"):
            made.close()
        raise KeyboardInterrupt

    with _replaced(interrupting, [*_CHANGES, (os, "close"), (fcntl, "flock")]):
        yield calls


@contextlib.contextmanager
def crashed(number):
    """End the process before its `number`-th change, of any thread: that one and all later ones raise `CrashError`.

    Yields a list of all changes. Files that are open at the end of the block are closed, as after a kill.
    """
    lock, calls, opened = threading.Lock(), [], {}
    real = os.open, os.close

    def ending(function, *args, **kwargs):
        with lock:
            calls.append(f"{function.__name__} {args[0]}")
            ends = 0 < number <= len(calls)
        if ends:
            raise CrashError
        return function(*args, **kwargs)

    def remembered(*args, **kwargs):
        descriptor = real[0](*args, **kwargs)
        opened[descriptor] = os.fstat(descriptor)
        return descriptor

    def close(descriptor):
        opened.pop(descriptor, None)
        real[1](descriptor)

    try:
        with (
            mock.patch.object(os, "open", remembered),
            mock.patch.object(os, "close", close),
            _replaced(ending, _CHANGES),
        ):
            yield calls
    finally:
        for descriptor, file in opened.items():
            with contextlib.suppress(OSError):  # what has closed it in another way
                if os.path.samestat(os.fstat(descriptor), file):
                    os.close(descriptor)


def crashes(change):
    """End `change()` before its first change of files, then before the second, until it comes to its end."""
    for number in itertools.count(1):
        with crashed(number) as calls, contextlib.suppress(CrashError):
            change()
        yield number
        if len(calls) < number:
            return


@contextlib.contextmanager
def _replaced(call, functions):
    """`call` takes the place of all `functions`, and of what opens files to write, which is its first argument."""

    def replaced(function, changes=lambda *_, **__: True):
        return lambda *args, **kwargs: (
            call(function, *args, **kwargs) if changes(*args, **kwargs) else function(*args, **kwargs)
        )

    def opens_to_write(_, flags, *__, **___):
        return bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))

    def writes(_, mode="r", *__, **___):
        return mode[:1] in "wax"

    with contextlib.ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(mock.patch.object(owner, name, replaced(getattr(owner, name))))
        stack.enter_context(mock.patch.object(os, "open", replaced(os.open, opens_to_write)))
        stack.enter_context(mock.patch.object(builtins, "open", replaced(builtins.open, writes)))
        yield
