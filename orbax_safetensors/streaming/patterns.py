"""Rules by patterns of names: the first pattern that is found (`re.search`) in a name counts for it.

A name is the dotted path of a leaf in its tree, or that of a stored tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from orbax_safetensors.errors import TensorMismatchError


class RuleError(TensorMismatchError):
    """A rule does not fit the arrays. The message begins with the argument that has the rule, and a colon."""


def check_pattern(argument: str, pattern: str) -> None:
    """Raises `RuleError` where `pattern` is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise RuleError(f"{argument}: {pattern!r} is no regular expression: {error}") from error


def first_found(patterns: Sequence[re.Pattern[str]], name: str) -> int | None:
    """The number of the pattern that counts for a name, None where there is none."""
    return next((number for number, pattern in enumerate(patterns) if pattern.search(name)), None)


def check_used(argument: str, patterns: Sequence[re.Pattern[str]], names: Iterable[str], what: str = "arrays") -> None:
    """Raises `RuleError` where a pattern counts for none of `names`: it may be misspelt, or come too late."""
    names = list(names)
    used = {first_found(patterns, name) for name in names}
    for number, pattern in enumerate(patterns):
        if number in used:
            continue
        if taken := sum(1 for name in names if pattern.search(name)):
            why = f"is not used: an earlier one is for all {taken} {what} that it is found in"
        else:
            why = f"is found in {none_of(names, what)}"
        raise RuleError(f"{argument}: {pattern.pattern!r} {why}")


def none_of(names: Sequence[str], what: str = "arrays") -> str:
    """What a message says of all names."""
    example = f", such as {names[0]!r}" if names else ""
    return f"none of the {len(names)} names of {what}{example}"
