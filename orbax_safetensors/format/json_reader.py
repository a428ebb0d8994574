"""JSON read value by value: values that a caller does not want are checked and skipped, never built.

This reads files of strangers: a value that is built takes up to 30 times the memory of its text. The reader is as
strict as the reference's for headers, except that a duplicate key is an error, at any depth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]  # which typeshed does not know
from typing import NoReturn

MAX_DEPTH = 127
"""Levels of nesting that the reference's parser follows."""

# Groups are repeated a bounded number of times, and not possessively: a repetition without bound takes memory for each
# time, and before Python 3.11.5 possessive groups match wrongly (https://github.com/python/cpython/issues/106052).
_MANY = "{0,50}"
_SPACE = r"[ \t\n\r]*+"
# All but quotes, backslashes and control characters. ASCII first, which takes half the time of the set of all others.
_CHARACTERS = r"[ !#-\[\]-~]*+[^\"\\\x00-\x1f]*+"
_NUMBER = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?"
_INTEGER = "(?:0|[1-9][0-9]{0,18}+)"
# Simple values, and lists and objects with at most one member of them: skipped in one match, however many.
_LEVELS = 3
_TEXT = f'"{_CHARACTERS}"'
_PLAIN = rf"(?:-?(?:0|[1-9][0-9]{{0,18}}+)(?:\.[0-9]++)?(?![0-9eE])|true|false|null|{_TEXT})"
for _ in range(_LEVELS):
    _LIST = rf"\[{_SPACE}(?:{_PLAIN}{_SPACE}(?:,{_SPACE}{_PLAIN}{_SPACE}){_MANY})?\]"
    _OBJECT = rf"\{{{_SPACE}(?:{_TEXT}{_SPACE}:{_SPACE}{_PLAIN}{_SPACE})?\}}"
    _PLAIN = rf"(?:{_PLAIN}|{_LIST}|{_OBJECT})"

NEXT_KEY = rf',{_SPACE}"({_CHARACTERS})"{_SPACE}:{_SPACE}'
"""Pattern of the next key of an object, without escapes, from the comma to the value; the group is the key."""

_space = re.compile(_SPACE)
_string = re.compile(f'"({_CHARACTERS})"')
_next_key = re.compile(NEXT_KEY)
# A match is empty if there is none, so that a search for all of them stops.
_next_text = re.compile(rf"{NEXT_KEY}{_string.pattern}{_SPACE}|")
_number = re.compile(_NUMBER)
_constant = re.compile("true|false|null")
_plain_items = re.compile(rf"(?:{_PLAIN}{_SPACE},{_SPACE}){_MANY}")
_integers = re.compile(rf"(?:{_INTEGER}{_SPACE},{_SPACE}){{1,1000}}")
_CONSTANTS = {"true": True, "false": False, "null": None}
_SHOWN = 60  # characters of the text in a message


class JsonReader:
    """A position in a JSON text. Each method reads the value there and moves behind it; ValueError for bad JSON."""

    def __init__(self, text: bytes) -> None:
        """Begin at the first value of `text`, a whole document in UTF-8."""
        try:
            self.text = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"expected JSON in UTF-8, found: {error}") from error
        self.at = 0
        self._skip_space()

    @property
    def next(self) -> str:
        """Return the first character of the value here: `{`, `[`, `"`, or of a number or constant; empty at the end."""
        return self.text[self.at : self.at + 1]

    @property
    def excerpt(self) -> str:
        """Return the beginning of the value here, for messages."""
        return repr(self.text[self.at : self.at + _SHOWN])

    def members(self, read: Container[str] = ()) -> Iterator[str]:
        """Yield each key of the object here; the caller reads or skips its value before it goes on to the next key.

        A caller may read further members as well, and keep their keys in `read`.
        """
        self._open("{")
        seen: set[str] = set()
        while True:
            if seen and (match := _next_key.match(self.text, self.at)):  # almost all keys
                key = match[1]
                self.at = match.end()
            elif not self._more("}", first=not seen):
                return
            else:
                key = self.string()
                self._expect(":")
            if key in seen or key in read:
                self._fail(f"the key {_cut(key)!r} twice in one object")
            seen.add(key)
            yield key

    def texts(self, read: dict[str, str]) -> None:
        """Read the next members into `read` as long as they are texts without escapes, under new keys."""
        for match in _next_text.finditer(self.text, self.at):
            key, value = match.groups()
            if key is None or key in read:
                self.at = match.start()
                break
            read[key] = value

    def items(self) -> Iterator[int]:
        """Yield the number of each item of the list here; the caller reads or skips the item, as for `members`."""
        self._open("[")
        number = 0
        while self._more("]", first=number == 0):
            yield number
            number += 1

    def end(self) -> None:
        """Check that nothing follows."""
        if self.at != len(self.text):
            self._fail(f"more text {self.excerpt}")

    def string(self) -> str:
        """Return the text here, which may contain lone surrogates."""
        if match := _string.match(self.text, self.at):
            self.move(match.end())
            return match[1]
        if self.next != '"':
            self._fail(f"{self.excerpt} instead of text")
        try:
            value: str
            value, end = scanstring(self.text, self.at + 1, True)
        except ValueError as error:
            self._fail(str(error))
        self.move(end)
        return value

    def scalar(self) -> str | float | bool | None:
        """Return the text, number or constant here.

        Integers of up to 20 digits, which include every u64, are int. Longer ones and `-0` are float, as in the
        reference; so are numbers with a point or an exponent. All are finite.
        """
        if self.next == '"':
            return self.string()
        if match := _number.match(self.text, self.at):
            literal = match[0]
            value = int(literal) if _is_integer(literal) else float(literal)
            if math.isinf(value):
                self._fail(f"a number out of the range of a double: {_cut(literal)}")
            self.move(match.end())
            return value
        if match := _constant.match(self.text, self.at):
            self.move(match.end())
            return _CONSTANTS[match[0]]
        self._fail(f"{self.excerpt} instead of a value")

    def integers(self) -> tuple[int, ...]:
        """Return the list of integers here, of up to 20 digits each."""
        numbers: list[int] = []
        for _ in self.items():
            while match := _integers.match(self.text, self.at):
                numbers += map(int, match[0].rstrip()[:-1].split(","))
                self.at = match.end()
            value = self.scalar()
            if type(value) is not int:
                self._fail(f"{_cut(repr(value))} in a list of integers")
            numbers.append(value)
        return tuple(numbers)

    def skip(self, depth: int) -> None:
        """Check the value here and move behind it; `depth` is its level of nesting if it is an object or a list.

        UTF-8 has to be able to hold its text.
        """
        inside: list[set[str] | None] = []  # for each open object its keys, for each open list None
        while True:
            if self.next and self.next in "{[":
                if depth + len(inside) > MAX_DEPTH:
                    self._fail(f"more than {MAX_DEPTH} levels of nesting")
                inside.append(set() if self.next == "{" else None)
                self.move(self.at + 1)
                first = True
            else:
                value = self.scalar()
                if type(value) is str:
                    check_encodable(value)
                first = False
            while inside and not self._more("]" if inside[-1] is None else "}", first=first):
                inside.pop()
                first = False
            if not inside:
                return
            keys = inside[-1]
            if keys is not None:
                key = self.string()
                check_encodable(key)
                if key in keys:
                    self._fail(f"the key {_cut(key)!r} twice in one object")
                keys.add(key)
                self._expect(":")
            elif depth + len(inside) + _LEVELS <= MAX_DEPTH and (match := _plain_items.match(self.text, self.at)):
                self.at = match.end()

    def _open(self, bracket: str) -> None:
        if self.next != bracket:
            self._fail(f"{self.excerpt} instead of {'an object' if bracket == '{' else 'a list'}")
        self.move(self.at + 1)

    def _more(self, bracket: str, *, first: bool) -> bool:
        """Read the comma before another member or item, or the `bracket` at the end; return whether another follows."""
        character = self.next
        if character == bracket:
            self.move(self.at + 1)
            return False
        if not first:
            if character != ",":
                self._fail(f"{self.excerpt} instead of ',' or {bracket!r}")
            self.move(self.at + 1)
        return True

    def _expect(self, character: str) -> None:
        if self.next != character:
            self._fail(f"{self.excerpt} instead of {character!r}")
        self.move(self.at + 1)

    def move(self, at: int) -> None:
        """Go on at `at`, behind the space that begins there."""
        self.at = at
        if self.text[at : at + 1] in " \t\n\r":  # also at the end
            self._skip_space()

    def _skip_space(self) -> None:
        match = _space.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _fail(self, found: str) -> NoReturn:
        raise ValueError(f"expected JSON, found {found} at character {self.at}")


def check_encodable(text: str) -> None:
    """Raise ValueError if UTF-8 cannot hold `text`."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = text[error.start]
        raise ValueError(f"expected text that UTF-8 can hold, found a lone surrogate {surrogate!r}") from error


def _is_integer(literal: str) -> bool:
    return len(literal) <= 20 and literal != "-0" and literal.lstrip("-").isdecimal()


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
