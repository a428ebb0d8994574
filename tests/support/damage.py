"""Ways in which a small file can be damaged."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

# JSON that a program of another purpose, or none, could have written.
_OTHERS = (b"{}", b"[]", b"null", b'{"a": 1}')


def damages(content: bytes, flips: int) -> Iterator[tuple[str, bytes | None]]:
    """Yield what is done to a file, and its content after that: None if the file is deleted."""
    yield "deleted", None
    yield "empty", b""
    for kept in (len(content) // 3, 9 * len(content) // 10, len(content) - 1):
        yield f"cut to {kept}", content[:kept]
    rng = random.Random(content)
    for _ in range(flips if content else 0):
        bit = rng.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(flipped)
    try:
        json.loads(content)
    except ValueError:
        return
    for other in _OTHERS:
        yield f"replaced by {other.decode()}", other
