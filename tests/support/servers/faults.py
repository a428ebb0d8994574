"""What a server can do wrong to a request. Which requests it does it to is told to `Server.fail`.

A 429 or a 503 is an `Answer`, with or without a `Retry-After` header; a burst of them is one for several requests. An
object is replaced half-way by a `Call`, which runs between two requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Call:
    """Before the request is answered, `function` is called, in a thread of the server."""

    function: Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Answer:
    """This is the answer, and the request has no other effect."""

    status: int
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""


@dataclasses.dataclass(frozen=True)
class IgnoreRange:
    """The whole object is sent, with a 200, whatever range was asked for."""


@dataclasses.dataclass(frozen=True)
class SetHeader:
    """A header of the answer has another value, or with None is missing."""

    name: str
    value: str | None


@dataclasses.dataclass(frozen=True)
class Cut:
    """The answer ends after `after` bytes of its body, `Content-Length` notwithstanding; before its head with None.

    Then the connection is reset (the client sees an error), closed (the client sees its end), or stalls (the client
    sees nothing more until it gives up). A request that changes something has had its effect.
    """

    after: int | None
    then: Literal["reset", "close", "stall"]


Fault = Call | Answer | IgnoreRange | SetHeader | Cut
