"""`Family`: a convention for a model's tree together with a Hugging Face architecture, described as views."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.names import some
from orbax_safetensors.geometry.view import UNKNOWN, View
from orbax_safetensors.mapping.envelope import Envelope

# Tensors of which a tree may be made, at least: three times those of the largest model, for checkpoints of which only
# some files are there. Where more are stored, as many times those.
_MOST_TENSORS = 250_000
_MOST_OF_STORED = 4

# What `tensor` makes of a name and a shape while `Family.describe` runs.
Bind = Callable[[str, tuple[int, ...]], View]
# The shapes of a tree's leaves by name, None if only the name is known.
LeafShapes = Mapping[str, tuple[int, ...] | None]
Variant = Mapping[str, Any]
_bind: ContextVar[Bind | None] = ContextVar("bind", default=None)


def tensor(name: str, shape: Sequence[int]) -> View:
    """The stored tensor `name`, which the config says has `shape`.

    While a checkpoint is opened or saved, it is that of the checkpoint, and the shape is checked.
    """
    if not all(shape):
        raise MappingError(f"{name!r} of shape {tuple(shape)} has no elements")
    bind = _bind.get()
    return View.tensor(name, shape, UNKNOWN) if bind is None else bind(name, tuple(shape))


class Tree(dict[str, View]):
    """What `Family.tree` returns where a plain dict does not say enough: views by tree path.

    Attributes:
      unused: regular expressions of stored names, matched whole, that no view uses, or not all of; they are left out.
      optional: regular expressions of tree paths, matched whole, which are left out where none of all their tensors is
        stored.
    """

    def __init__(self, leaves: Mapping[str, View], *, unused: Sequence[str] = (), optional: Sequence[str] = ()) -> None:
        super().__init__(leaves)
        self.unused = _patterns("unused", unused)
        self.optional = _patterns("optional", optional)


def _patterns(what: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Checked regular expressions."""
    if isinstance(patterns, str):
        raise MappingError(f"{what}: expected a list of regular expressions, found {patterns!r}")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise MappingError(f"{what}: {pattern!r} is not a regular expression: {error}") from error
    return tuple(patterns)


def _only_the_default(leaves: LeafShapes) -> Iterable[Variant]:
    return [{}]


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
      name: `convention.model`, as in `maxtext.qwen3`.
      architectures: those of `config.json` that it is for.
      tree: `tree(config, **variant)` returns a view for every path of the model's tree, whose parts are joined by
        dots. `config` is the content of `config.json`; the keywords are the family's own switches. It is plain Python
        and runs for restores and for saves alike.
      renames: pairs `(regular expression, replacement)`, as for `re.sub`, that bring other spellings of stored names
        to those that `tree` uses and saves write.
      variants: `variants(leaves)` yields the variants that a tree with leaves of these names and shapes may be, the
        likeliest first. Names may have a leading `params` more or less than `tree` has.
      variant: switches that are set unless a caller sets them.
      envelope: what stands around the tree in a checkpoint of Orbax.
    """

    name: str
    architectures: tuple[str, ...]
    tree: Callable[..., Mapping[str, View]]
    renames: tuple[tuple[str, str], ...] = ()
    variants: Callable[[LeafShapes], Iterable[Variant]] = _only_the_default
    variant: Variant = field(default_factory=dict, hash=False)
    envelope: Envelope = field(default=Envelope(), hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.architectures, str) or not all(isinstance(name, str) for name in self.architectures):
            raise MappingError(f"{self.name}: expected a tuple of architectures, found {self.architectures!r}")
        _patterns(f"{self.name}: renames", [pattern for pattern, _ in self.renames])

    def describe(self, config: Mapping[str, Any], variant: Variant, bind: Bind, *, stored: int = 0) -> Tree:
        """`tree` with its tensors made by `bind`; `stored` is how many there are of them, or of leaves to save.

        Raises `MappingError` where the config lacks or contradicts what the tree is made of, for a switch that the
        family does not have, where the tree is none of views, and where it is made of far more tensors than are stored.
        """
        variant = {**self.variant, **variant}
        self.check_variant(variant)
        most = max(_MOST_TENSORS, _MOST_OF_STORED * stored)
        described = count()

        def bounded(name: str, shape: tuple[int, ...]) -> View:
            if next(described) == most:
                raise MappingError(
                    f"the tree of this config.json{_counts(config, variant)} is made of more than {most} tensors, "
                    f"{name!r} among them, and the checkpoint has {stored}"
                )
            return bind(name, shape)

        token = _bind.set(bounded)
        try:
            tree = self.tree(config, **variant)
        except KeyError as error:
            raise MappingError(f"{self.name}: config.json has no {error}") from error
        except MappingError as error:
            raise MappingError(f"{self.name}: {error}") from error
        except Exception as error:
            raise MappingError(f"{self.name}: no tree follows from this config.json: {error!r}") from error
        finally:
            _bind.reset(token)
        if not isinstance(tree, Mapping):
            raise MappingError(f"{self.name}: expected a dict of views by dotted path, found {tree!r:.80}")
        for path, view in tree.items():
            if not isinstance(path, str) or not isinstance(view, View):
                raise MappingError(
                    f"{self.name}: expected a dict of views by dotted path, found {path!r}: {view!r:.80}"
                )
            above = path.split(".")
            for depth in range(1, len(above)):
                if (parent := ".".join(above[:depth])) in tree:
                    raise MappingError(f"{self.name}: {parent!r} cannot be a leaf and have {path!r} below it")
        return tree if isinstance(tree, Tree) else Tree(tree)

    def check_variant(self, variant: Variant) -> None:
        """Raises `MappingError` for switches that the family does not have, or that are of another type than theirs."""
        switches = list(inspect.signature(self.tree).parameters.values())[1:]
        known = {switch.name: switch for switch in switches if switch.kind is not inspect.Parameter.VAR_KEYWORD}
        if len(known) == len(switches) and (unknown := [name for name in variant if name not in known]):
            raise MappingError(f"{self.name}: there is no variant {unknown}; there are {list(known)}")
        for name, value in variant.items():
            default = known[name].default if name in known else None
            if isinstance(default, bool | int) and type(value) is not type(default):
                raise MappingError(f"{self.name}: expected a {type(default).__name__} for {name}, found {value!r}")


def envelope_of(family: Family | None, variant: Variant | None) -> Envelope:
    """Return what stands around the tree of a family's variant; nothing without a family."""
    return Envelope() if family is None else family.envelope.of({**family.variant, **(variant or {})})


def _counts(config: Mapping[str, Any], variant: Mapping[str, Any]) -> str:
    """What a config says of how many layers, experts and heads there are, the most of anything first."""
    named = {**config, **variant}
    if isinstance(text := config.get("text_config"), Mapping):
        named |= text
    counts = {key: value for key, value in named.items() if type(value) is int and key.startswith(("num_", "n_"))}
    largest = sorted(counts, key=counts.__getitem__, reverse=True)
    return f" ({some([f'{key} = {counts[key]}' for key in largest])})" if counts else ""
