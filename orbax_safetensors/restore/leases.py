"""Leases of the files that a restore maps: each lasts as long as somebody holds it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from orbax_safetensors.storage.leased_mapping import LeasedMapping
from orbax_safetensors.storage.store import File

Range = tuple[int, int, int]  # file, begin, end


class Leases:
    """Files mapped under read leases, by number. Safe for several threads."""

    def __init__(self) -> None:
        """Lease no file yet."""
        self._held: dict[int, tuple[LeasedMapping, int]] = {}  # with the number of holders
        self._refused: set[int] = set()
        self._lock = threading.Lock()

    def hold(self, number: int, file: File) -> LeasedMapping | None:
        """Lease the open file of a number, until `let_go`; None if it cannot be leased, or not any more."""
        if number in self._refused:
            return None
        with self._lock:
            mapping, holders = self._held.get(number, (None, 0))
            if mapping is None and (mapping := file.lease()) is None:
                self._refused.add(number)
                return None
            self._held[number] = mapping, holders + 1
        return mapping

    def populate(self, number: int, begin: int, end: int) -> None:
        """Bring bytes of a file that is held into memory."""
        self._held[number][0].populate(begin, end)

    def let_go(self, numbers: Iterable[int], ranges: Iterable[Range]) -> None:
        """Hold files no longer, nor the pages of `ranges`. What nobody holds, other programs do not wait for."""
        for number, begin, end in ranges:
            self._held[number][0].release(begin, end)
        for number in numbers:
            with self._lock:
                mapping, holders = self._held.pop(number)
                if holders > 1:
                    self._held[number] = mapping, holders - 1
                else:
                    mapping.close()

    @property
    def wanted(self) -> list[int]:
        """Return the files that other programs wait for."""
        with self._lock:  # which keeps others from closing one meanwhile
            return [number for number, (mapping, _) in self._held.items() if mapping.is_wanted]

    def refuse(self, numbers: Iterable[int]) -> None:
        """Lease these files no more. Holders keep their leases."""
        self._refused.update(numbers)

    def abandon(self) -> None:
        """Let every lease end with the last array over its file: a device may have one that nobody knows of."""
        self._held.clear()

    def close(self) -> None:
        """End all leases."""
        while self._held:
            self._held.popitem()[1][0].close()
