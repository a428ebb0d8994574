"""The options of a transfer and their defaults. Public functions set them; inner functions require them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from orbax_safetensors.errors import SafetensorsError

Dequantize = bool | Literal["split"]
Progress = Callable[[int, int], None]  # of the bytes that have moved, and of all

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, kw_only=True)
class SafetensorsOptions:
    """How bytes are moved; the guide to options says more of each.

    If a default is None, it depends on the store that a path belongs to.

    ```python
    options = ost.SafetensorsOptions(checksums=True, progress=lambda done, total: print(f"{done} of {total} bytes"))
    handler = ost.SafetensorsHandler(options=options)
    ```

    Attributes: What most people set
      progress: True for a bar on stderr, or a function that is called with the bytes that this process has moved, and
        with all that it will move.
      threads: reads or writes in flight at once, by default up to 16 for files and 64 for object stores.
      dequantize: what a family makes of quantised tensors: True decodes them, "split" makes codes, scales and zero
        points leaves of their own, `qvalue`, `scale` and `zero_point`, and False keeps them as they are stored.
      join_timeout_secs: how long a process waits for others that have not begun the same save, or the same restore if
        one of them reads for others.

    Attributes: Memory
      in_flight_bytes: host memory for bytes on their way to or from an accelerator.
      alias: whether CPU arrays share the pages of files, which are then read when they are used and must not change.
      direct: whether to read local files past the page cache; "auto" does so for more bytes than a quarter of memory.

    Attributes: Integrity
      checksums: whether a restore compares tensors with the checksums of their save, and fails if one differs.
      fsync: whether a save ends when its bytes are on the disk, rather than when the system has them.
      alignment: the data of a saved file begins at a multiple of this many bytes: 64 for `alias`, 8 for the same bytes
        as the reference writer's.

    Attributes: Stores
      storage_options: credentials, endpoints, timeouts and retries: a dict with the names of obstore's configurations.
      max_gap_bytes: coalesce two reads of one shard if the gap between them is at most this long.

    Raises:
      SafetensorsError: a number is out of range, or a header cannot be sent.
    """

    progress: Progress | bool | None = field(default=None, repr=False, compare=False)
    threads: int | None = None
    dequantize: Dequantize = True
    join_timeout_secs: float = 600

    in_flight_bytes: int = 2 * 2**30
    alias: bool = False
    direct: bool | Literal["auto"] = "auto"

    checksums: bool = False
    fsync: bool = False
    alignment: int = 64

    # Not shown and not hashed: the values may be secret, and a dict has no hash.
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    max_gap_bytes: int | None = None

    @staticmethod
    def of(options: SafetensorsOptions | None) -> SafetensorsOptions:
        """Return `options`, or those that nobody has set for None; raises `SafetensorsError` if they are none."""
        if not isinstance(options, SafetensorsOptions | None):
            raise SafetensorsError(f"options: expected SafetensorsOptions(...), found {options!r}")
        return options or SafetensorsOptions()

    def __post_init__(self) -> None:
        for name, least in (("in_flight_bytes", 1), ("threads", 1), ("max_gap_bytes", 0), ("alignment", 8)):
            value = getattr(self, name)
            if value is None and name in ("threads", "max_gap_bytes"):
                continue
            if not isinstance(value, int) or value < least:
                raise SafetensorsError(
                    f"SafetensorsOptions: {name} is {value!r}, must be an integer of at least {least}"
                )
        if not isinstance(self.join_timeout_secs, int | float) or not 0 < self.join_timeout_secs < inf:
            raise SafetensorsError(
                f"SafetensorsOptions: join_timeout_secs is {self.join_timeout_secs!r}, must be a positive number"
            )
        if self.storage_options is not None and not isinstance(self.storage_options, Mapping):
            raise SafetensorsError("SafetensorsOptions: storage_options must be a dict")
        _check_headers(self.storage_options or {})
        check_progress(self.progress, "SafetensorsOptions: progress")
        if self.dequantize not in (True, False, "split"):
            raise SafetensorsError(
                f"SafetensorsOptions: dequantize is {self.dequantize!r}, must be True, False or 'split'"
            )
        if not isinstance(self.direct, bool) and self.direct != "auto":
            raise SafetensorsError(f"SafetensorsOptions: direct is {self.direct!r}, must be True, False or 'auto'")
        if not isinstance(self.checksums, bool):
            raise SafetensorsError(f"SafetensorsOptions: checksums is {self.checksums!r}, must be True or False")
        if self.alias and self.checksums:
            raise SafetensorsError(
                "SafetensorsOptions: alias and checksums exclude each other, because alias reads nothing"
            )
        if self.alignment % 8:
            raise SafetensorsError(f"SafetensorsOptions: alignment is {self.alignment}, must be a multiple of 8")


def check_progress(progress: Any, where: str) -> None:
    """Raise `SafetensorsError`, which begins with `where`, if `progress` is something that cannot be called."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise SafetensorsError(f"{where} is {progress!r}, must be a function, or True for a bar")


def _check_headers(storage_options: Mapping[str, Any]) -> None:
    """Raise `SafetensorsError` for invalid headers. The message shows no values or wrong names: they may be secret."""
    headers = storage_options.get("default_headers", {})
    if not isinstance(headers, Mapping):
        raise SafetensorsError("storage_options: default_headers must be a dict of names and values of headers")
    for number, (name, value) in enumerate(headers.items(), 1):
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise SafetensorsError(
                f"storage_options: default_headers: name {number} of {len(headers)} is not the name of a header, which "
                "has letters, digits and any of !#$%&'*+-.^_`|~"
            )
        _check_value(f"default_headers: the value of {name!r}", value)
    _check_value("user_agent", storage_options.get("user_agent", ""))


def _check_value(what: str, value: Any) -> None:
    if not isinstance(value, str | bytes):
        raise SafetensorsError(f"storage_options: {what} must be text, is a {type(value).__name__}")
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not text.isascii() or not text.replace("\t", " ").isprintable():
        raise SafetensorsError(f"storage_options: {what} has a character that a header cannot have, such as a newline")
