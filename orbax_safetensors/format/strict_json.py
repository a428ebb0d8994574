"""JSON of strangers: what `json` reads, without duplicate keys, NaN and infinities, or objects that fill the memory."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

# Built, an empty list takes thirty times the memory of its text. What programs write is mostly names and numbers: a
# text that is not small holds at most one object or list in as many bytes as this, on average.
_SMALL_BYTES = 64 << 10
_DENSE = 6
_SHOWN = 60  # characters of the text in a message


def parse(text: bytes) -> Any:
    """Return what a whole text of JSON in UTF-8 says; ValueError if it is not JSON, or has a duplicate key.

    Integers of up to 20 digits, which include every u64, are int. Longer ones and `-0` are float, as in the reference.
    Texts may contain lone surrogates.
    """
    check_density(text)
    try:
        return decoder.decode(text.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"expected JSON in UTF-8, found: {error}") from error
    except json.JSONDecodeError as error:
        found = error.doc[error.pos : error.pos + _SHOWN]
        raise ValueError(f"expected JSON, found {found!r} at character {error.pos} ({error.msg})") from error
    except RecursionError:
        raise ValueError("expected JSON, found too many levels of nesting") from None


def loads(text: bytes) -> Any:
    """Return what a record says, which may have all that `json` reads; ValueError if it is not JSON, or too dense."""
    check_density(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("expected JSON, found too many levels of nesting") from None


def check_density(text: bytes) -> None:
    """Raise ValueError if a text of JSON has so many objects and lists that they would take much memory."""
    nested = text.count(b"[") + text.count(b"{")
    if len(text) > _SMALL_BYTES and nested * _DENSE > len(text):
        raise ValueError(
            f"expected at most {len(text) // _DENSE} objects and lists in {len(text)} bytes of JSON, found {nested}"
        )


def check_encodable(text: str) -> None:
    """Raise ValueError if UTF-8 cannot hold `text`."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = text[error.start]
        raise ValueError(f"expected text that UTF-8 can hold, found a lone surrogate {surrogate!r}") from error


def _object(members: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        ((twice, _),) = Counter(key for key, _ in members).most_common(1)
        raise ValueError(f"expected JSON, found the key {_cut(twice)!r} twice in one object")
    return found


def _integer(literal: str) -> int | float:
    return int(literal) if len(literal) <= 20 and literal != "-0" else _finite(literal)


def _finite(literal: str) -> float:
    number = float(literal)
    if math.isinf(number):
        raise ValueError(f"expected JSON, found a number out of the range of a double: {_cut(literal)}")
    return number


def _constant(name: str) -> None:
    raise ValueError(f"expected JSON, found {name}")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


decoder = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_finite, parse_constant=_constant)
