"""Rules by regular expressions of names: the first one that matches anywhere in a name (`re.search`) decides.

A name is the dotted path of a leaf in its tree, or the name of a stored tensor. A pattern may have or omit the `.value`
at the end of paths in an `nnx.State`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from math import prod

from orbax_safetensors.errors import RuleError
from orbax_safetensors.format.names import some, without_value

logger = logging.getLogger(__name__)

Misfit = tuple[str, tuple[int, ...], str]
"""An array's name, its shape, and why a rule does not fit it."""


# What a regular expression of names hardly repeats: its beginning, or one character of a word, as in `layers.1*`.
_GLOB = re.compile(r"(^|[\w?])\*")
# An escape or a set, which may be repeated, or have a star in it.
_ONE_OF_MANY = re.compile(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]")


def check_pattern(argument: str, pattern: str) -> None:
    """Raise `RuleError` if `pattern` is not a regular expression, or looks like a shell pattern such as `*.mlp.*`."""
    if isinstance(pattern, str) and _GLOB.search(_ONE_OF_MANY.sub("-", pattern)):
        regex = repr(_regex_of(pattern)).replace("\\\\", "\\")
        raise RuleError(
            f"{argument}: {pattern!r} is a regular expression, searched anywhere in the name; for the glob "
            f"{pattern!r} write {regex}"
        )
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise RuleError(f"{argument}: {pattern!r} is not a regular expression: {error}") from error


def _regex_of(glob: str) -> str:
    """Return the regular expression that finds the names that a shell pattern matches.

    A pattern that also has signs of regular expressions keeps them: only its stars become `.*`.
    """
    if re.search(r"[\\^$|+()\[\]{}]", glob):
        return _GLOB.sub(r"\1.*", glob)
    parts = re.split(r"\*+", glob)
    regex = ".*".join(re.escape(part).replace(r"\?", ".") for part in parts if part)
    return f"{'^' * bool(parts[0])}{regex}{'$' * bool(parts[-1])}" or "."


def first_match(patterns: Sequence[re.Pattern[str]], name: str) -> int | None:
    """Return the index of the first pattern that matches a name; None if none does."""
    return next((number for number, pattern in enumerate(patterns) if _matches(pattern, name)), None)


def _matches(pattern: re.Pattern[str], name: str) -> bool:
    return bool(pattern.search(name) or pattern.search(without_value(name)))


def check_used(argument: str, patterns: Sequence[re.Pattern[str]], names: Iterable[str], what: str = "arrays") -> None:
    """Raise `RuleError` if a pattern decides for none of `names`: it may be misspelt, or come too late."""
    names = list(names)
    used = {first_match(patterns, name) for name in names}
    for number, pattern in enumerate(patterns):
        if number in used:
            continue
        if taken := sum(_matches(pattern, name) for name in names):
            why = f"is not used: earlier patterns apply to all {taken} {what} that it is found in"
        else:
            why = f"is found in {none_of(names, what)}"
        raise RuleError(f"{argument}: {pattern.pattern!r} {why}")


def check_fit(rule: str, spec: object, fitting: int, misfits: Sequence[Misfit]) -> None:
    """Check a rule that fits the shapes of `fitting` arrays, and does not fit those of `misfits`.

    Raises `RuleError` if it fits no array. Otherwise its pattern may match the misfits by accident: warns that these
    are left whole.
    """
    if not misfits:
        return
    if not fitting:
        name, shape, why = misfits[0]
        raise RuleError(f"{rule}: {name!r} of shape {shape}, sharded as {spec}: {why}")
    misfits = sorted(misfits, key=lambda misfit: -prod(misfit[1]))
    logger.warning(
        "%s: fits %d of %d arrays, and the others are left whole: %s",
        rule,
        fitting,
        fitting + len(misfits),
        some(misfits, lambda misfit: f"{misfit[0]!r} of shape {misfit[1]} ({misfit[2]})"),
    )


def none_of(names: Sequence[str], what: str = "arrays") -> str:
    """Return how a message says that no name fits."""
    example = f", such as {names[0]!r}" if names else ""
    return f"none of the {len(names)} names of {what}{example}"
