"""The order in which people look for parts of a model: embeddings, its layers by number, last norms, the head."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

_Entry = TypeVar("_Entry")

# Of a layer or an expert, at the end of a part of a name. Longer ones count as text.
_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,18}$")
# What a part outside of layers is called, and its place among those beside it.
_PLACES = (
    (re.compile(r"head|logits|^(embed_out|score|classifier)$"), 3),
    (re.compile(r"^(?!pre).*norm|^ln_f$"), 2),
    (re.compile(r"emb|^(wte|wpe)$"), 0),
)
_ELSEWHERE = 1


def by_layer(entries: Iterable[_Entry], name: Callable[[_Entry], str]) -> list[_Entry]:
    """Return `entries` in the order of layers: layer 2 before layer 10, each with its parts in the same order.

    Parts of names end at dots. Those beside each other, numbers aside, keep the order in which they first appear;
    outside of layers, embeddings come first, and norms and heads last.
    """
    ranks: dict[str, int] = {}

    def key(text: str) -> list[tuple[int, int, int]]:
        keys, prefix, is_in_layer = [], "", False
        for part in text.split("."):
            number = _NUMBER.search(part)
            prefix += "." + _NUMBER.sub("#", part)
            place = _ELSEWHERE if is_in_layer else _place(part)
            keys.append((place, ranks.setdefault(prefix, len(ranks)), int(number[0]) if number else -1))
            is_in_layer = is_in_layer or number is not None
        return keys

    return sorted(entries, key=lambda entry: key(name(entry)))


def _place(part: str) -> int:
    return next((place for pattern, place in _PLACES if pattern.search(part)), _ELSEWHERE)
