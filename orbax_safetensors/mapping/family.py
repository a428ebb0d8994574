"""`Family`: a convention for a model's tree together with a Hugging Face architecture, described as views."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors.errors import MappingError
from orbax_safetensors.format.names import hint, some
from orbax_safetensors.geometry.view import UNKNOWN, VIEW_OPERATIONS, View

# The key of custom metadata under which a conversion records a `FamilyUse`.
RECORD_KEY = "orbax_safetensors"

# The most tensors of a tree: three times those of the largest model, for checkpoints with some of their files only, or
# this many times the stored tensors if that is more.
_MOST_TENSORS = 250_000
_MOST_OF_STORED = 4

# What a message adds if there is no config.
SAVE_CONFIG = "pass like= or config=: the family needs a config.json"
NO_CONFIG = "put the model's config.json beside the files; a save takes it from config= or like="

# No dimension is as long; a config that says so is damaged or hostile.
MOST_SIZE = 2**40

# Makes the result of `tensor` while `Family.describe` runs.
Bind = Callable[[str, tuple[int, ...]], View]
# Pairs of a regular expression and its replacement.
Renames = Sequence[tuple[str, str]]
# The shapes of stored tensors by name.
Shapes = Mapping[str, tuple[int, ...]]
# The shapes of a tree's leaves by name, None if only the name is known.
LeafShapes = Mapping[str, tuple[int, ...] | None]
Variant = Mapping[str, Any]


class _DescribeContext(NamedTuple):
    """What `tensor` and `stored_shapes` know of a checkpoint while `Family.describe` runs."""

    bind: Bind = lambda name, shape: View.tensor(name, shape, UNKNOWN)
    shapes: Shapes | None = None


_NO_CHECKPOINT = _DescribeContext()
_describe_context: ContextVar[_DescribeContext] = ContextVar("describe_context", default=_NO_CHECKPOINT)


def tensor(name: str, shape: Sequence[int]) -> View:
    """Return the stored tensor `name`, which has `shape` according to the config.

    ```python
    query = ost.mapping.tensor("model.layers.0.self_attn.q_proj.weight", (64, 32))
    print(query.T.reshape((32, 4, 16)).shape)
    ```

    While a checkpoint is opened or saved, the result is the checkpoint's tensor, and the shape is checked.
    """
    if not all(isinstance(size, int | np.integer) and 0 <= size < MOST_SIZE for size in shape):
        raise MappingError(f"{name!r} of shape {tuple(shape)!s:.200}: expected integers below 2**40")
    stored = _describe_context.get()
    if not all(shape) and (stored.shapes or {}).get(name) != tuple(shape):
        raise MappingError(f"{name!r} of shape {tuple(shape)} has no elements")
    return stored.bind(name, tuple(shape))


def stored_shapes() -> Shapes:
    """Return the shapes of all tensors of the checkpoint, by name, for a tree that follows from them.

    ```python
    def tree(config):
        return {name: ost.mapping.tensor(name, shape) for name, shape in ost.mapping.stored_shapes().items()}

    params = ost.load("/models/llama", family=ost.mapping.Family("mine.flat", (), tree))
    ```

    Names are those after `Family.renames`. Quantised tensors have the shape of their values, and what only quantised
    computation needs is left out. Raises `MappingError` without a checkpoint, as in a save without `like`.
    """
    if (shapes := _describe_context.get().shapes) is None:
        raise MappingError(
            "the tree follows from the names and shapes of stored tensors, and there are none yet: a save takes them "
            "from a checkpoint, with like="
        )
    return shapes


class Tree(dict[str, View]):
    """Views by tree path. `Family.tree` returns a `Tree` if a plain dict does not say enough.

    ```python
    views = {"head": ost.mapping.tensor("lm_head.weight", (128, 64)).T}
    tree = ost.mapping.Tree(views, unused=[r".*\\.inv_freq"], optional=["head"])
    ```

    Attributes:
      unused: regular expressions for the whole names of stored tensors that the views may leave out, wholly or partly.
      optional: regular expressions for whole tree paths; these leaves are left out if none of their tensors is stored.
      shared: names of stored tensors that several leaves may use; a save takes as many leaves as it needs.
    """

    def __init__(
        self,
        leaves: Mapping[str, View],
        *,
        unused: Sequence[str] = (),
        optional: Sequence[str] = (),
        shared: Iterable[str] = (),
    ) -> None:
        super().__init__(leaves)
        self.unused: tuple[str, ...] = checked_patterns("unused", unused)
        self.optional: tuple[str, ...] = checked_patterns("optional", optional)
        self.shared: frozenset[str] = frozenset(shared)


def is_stored(name: str) -> bool:
    """Return whether a checkpoint has a tensor of this name, for models that are stored in several ways."""
    return name in (_describe_context.get().shapes or {})


def checked_patterns(what: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns; `MappingError` if they are not regular expressions."""
    if isinstance(patterns, str):
        raise MappingError(f"{what}: expected a list of regular expressions, found {patterns!r}")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise MappingError(f"{what}: {pattern!r} is not a regular expression: {error}") from error
    return tuple(patterns)


def _no_switches(_: Mapping[str, Any]) -> Variant:
    return {}


def _to_all(config: Mapping[str, Any]) -> bool:
    return True


def _only_the_default(leaves: LeafShapes) -> Iterable[Variant]:
    return [{}]


class FamilyUse(NamedTuple):
    """The family that a tree is of, by name, and its switches, as results name and directories record them."""

    family: str | None
    variant: Variant

    def record(self) -> dict[str, Any]:
        """Return what JSON can hold of this."""
        return {"family": self.family, "variant": {name: at for name, at in self.variant.items() if _is_json(at)}}


NO_FAMILY = FamilyUse(None, {})


@dataclass(frozen=True)
class StateWrapper:
    """A checkpoint's tree that holds a family's tree. By default, the checkpoint's tree is the family's tree.

    ```python
    wrapper = ost.mapping.StateWrapper(key="params", rest={"step": 0})
    print(wrapper.around({"embedding": 1}))  # {'step': 0, 'params': {'embedding': 1}}
    ```

    Attributes:
      key: the key of the family's tree in the checkpoint's tree.
      rest: the other values of the checkpoint's tree, by key: Python scalars and empty nodes.
      switches: the family's switches that are in the checkpoint's custom metadata, with their values.
      root: the prefix of all names of the family's leaves.
      found_below: prefixes that a checkpoint may have instead; the first that any of its names begins with counts.
    """

    key: str = ""
    rest: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, Any] = field(default_factory=dict)
    root: str = ""
    found_below: tuple[str, ...] = ("",)

    @property
    def above(self) -> str:
        """Return the prefix of the names of the family's leaves in a new checkpoint."""
        return f"{self.key}." if self.key else ""

    @property
    def custom_metadata(self) -> dict[str, Any] | None:
        """Return the custom metadata of a new checkpoint; None if it has none."""
        return dict(self.switches) or None

    def of(self, variant: Mapping[str, Any]) -> StateWrapper:
        """Return the wrapper with the switches of a variant."""
        return replace(self, switches={name: variant.get(name, value) for name, value in self.switches.items()})

    def around(self, tree: Any) -> Any:
        """Return the checkpoint's tree, given the family's."""
        return {**self.rest, self.key: tree} if self.key else tree

    def variant(self, custom_metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return the switches in a checkpoint's metadata."""
        return {name: custom_metadata[name] for name in self.switches if name in custom_metadata}

    def leaves(self, names: Iterable[str]) -> dict[str, str]:
        """Return the family's leaves among the `names` of a checkpoint, as a dict from the family's to these names."""
        names = list(names)
        below = next((prefix for prefix in self.found_below if any(name.startswith(prefix) for name in names)), "")
        return {self.root + name.removeprefix(below): name for name in names if name.startswith(below)}


@dataclass(frozen=True)
class Family:
    """A model family.

    ```python
    from orbax_safetensors.mapping import Family, Tree, tensor

    def tree(config):
        embedding = tensor("model.embed_tokens.weight", (config["vocab_size"], config["hidden_size"]))
        return Tree({"embedding": embedding.T}, unused=[".*"])

    family = Family("mine.llama", ("LlamaForCausalLM",), tree)
    embedding = ost.load("/models/llama", family=family)["embedding"]
    ```

    Attributes:
      name: `convention.model`, as in `maxtext.qwen3`.
      architectures: the values of `architectures` in `config.json` that the family is for.
      tree: `tree(config, **variant)` returns a view for every path of the model's tree, whose parts are joined by
        dots. `config` is the content of `config.json`; the keywords are the family's switches. The function is plain
        Python and runs for restores and for saves alike.
      renames: pairs `(regular expression, replacement)`, as for `re.sub`, that change other spellings of stored names
        to the names that `tree` uses and saves write; or a function from the config to such pairs.
      variants: `variants(leaves)` yields the possible variants of a tree with leaves of these names and shapes, the
        likeliest first. A leading `params` level of the names is optional.
      variant: default values of switches.
      wrapper: the tree around the family's tree in a checkpoint of Orbax.
      applies_to: `applies_to(config)` returns whether the family is for a model of its architectures with this config;
        for other models of these architectures there may be another family.
      stored_as: `stored_as(shapes)` returns the switches that say how a checkpoint with tensors of these names and
        shapes stores its model, for restores whose caller does not set them. Saves have the defaults.
      configured_as: `configured_as(config)` returns the switches that follow from `config.json`, for restores and saves
        whose caller does not set them.
    """

    name: str
    architectures: tuple[str, ...]
    tree: Callable[..., Mapping[str, View]]
    renames: Renames | Callable[[Mapping[str, Any]], Renames] = ()
    variants: Callable[[LeafShapes], Iterable[Variant]] = _only_the_default
    variant: Variant = field(default_factory=dict, hash=False)
    wrapper: StateWrapper = field(default=StateWrapper(), hash=False)
    applies_to: Callable[[Mapping[str, Any]], bool] = _to_all
    stored_as: Callable[[Shapes], Variant] = _no_switches
    configured_as: Callable[[Mapping[str, Any]], Variant] = _no_switches

    def __post_init__(self) -> None:
        if isinstance(self.architectures, str) or not all(isinstance(name, str) for name in self.architectures):
            raise MappingError(f"{self.name}: expected a tuple of architectures, found {self.architectures!r}")
        if not callable(self.renames):
            checked_patterns(f"{self.name}: renames", [pattern for pattern, _ in self.renames])

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Raise a `MappingError`, which says `what` fails, for anything that a function of the family raises."""
        try:
            yield
        except Exception as error:
            raise MappingError(f"{self.name}: {what}: {error!r}") from error

    def renamed(self, names: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
        """Return the names that the family has for stored tensors, by the names of the tensors."""
        with self.failing("its `renames` fail"):
            renames = self.renames(config) if callable(self.renames) else self.renames
            renamed = {name: name for name in names}
            for pattern, replacement in renames:
                renamed = {name: re.sub(pattern, replacement, now) for name, now in renamed.items()}
        return renamed

    def describe(
        self,
        config: Mapping[str, Any],
        variant: Variant,
        bind: Bind,
        stored: Shapes | None = None,
        *,
        leaves: int = 0,
    ) -> Tree:
        """Return `tree` with its tensors made by `bind`.

        `stored` are the shapes of the checkpoint's tensors by the family's names. A save that has no checkpoint passes
        the number of its `leaves` instead.

        Raises `MappingError` if the config lacks a value or has a wrong one, if the family does not have a switch, if
        the tree is not a dict of views, and if it is made of far more tensors than are stored.
        """
        variant = {**self._configured(config), **self.variant, **variant}
        self.check_variant(variant)
        number = leaves if stored is None else len(stored)
        most = max(_MOST_TENSORS, _MOST_OF_STORED * number)
        described = count()

        def bounded(name: str, shape: tuple[int, ...]) -> View:
            if next(described) == most:
                raise MappingError(
                    f"the tree of this config.json{_counts(config, variant)} is made of more than {most} tensors, "
                    f"{name!r} among them, and the checkpoint has {number}"
                )
            return bind(name, shape)

        token = _describe_context.set(_DescribeContext(bounded, stored))
        try:
            tree = self.tree(config, **variant)
        except KeyError as error:
            advice = "" if config else f", because there is none; {NO_CONFIG if stored is not None else SAVE_CONFIG}"
            raise MappingError(f"{self.name}: config.json has no {error}{advice}") from error
        except MappingError as error:
            raise MappingError(f"{self.name}: {error}") from error
        except Exception as error:
            if "'View'" in str(error):  # a method or an operator that views do not have
                raise MappingError(
                    f"{self.name}: its function raised {type(error).__name__}: {error}; {VIEW_OPERATIONS}"
                ) from error
            raise MappingError(f"{self.name}: no tree follows from this config.json: {error!r}") from error
        finally:
            _describe_context.reset(token)
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

    def variant_of(self, shapes: Shapes, variant: Variant) -> Variant:
        """Return `variant` with the switches that it leaves to a checkpoint with tensors of these names and shapes."""
        return {**self._stored(shapes), **self.variant, **variant}

    def use(self, config: Mapping[str, Any], stored: Shapes | None, variant: Variant) -> FamilyUse:
        """Return the switches of a tree that `variant` describes, except those that only say how files store it.

        `stored` is as for `describe`. A switch without a value, which leaves a choice to the checkpoint, is left out.
        """
        named, _ = self._switches()
        defaults = {name: value for name, value in named.items() if value is not inspect.Parameter.empty}
        switches = {**defaults, **self._configured(config), **self.variant, **variant}
        file_switches = () if stored is None else self._stored(stored)
        return FamilyUse(
            self.name, {name: at for name, at in switches.items() if at is not None and name not in file_switches}
        )

    @property
    def has_switches(self) -> bool:
        """Return whether there is anything to choose about the tree."""
        named, takes_others = self._switches()
        return bool(named) or takes_others

    def recorded(self, record: Any) -> Variant:
        """Return the switches in a `FamilyUse.record`, if it is of this family, as far as the family still has them."""
        if not isinstance(record, Mapping) or record.get("family") != self.name:
            return {}
        named, takes_others = self._switches()
        variant = record.get("variant") or {}
        return {name: value for name, value in variant.items() if name in named or takes_others}

    def recalling(self, record: Any) -> Family:
        """Return the family that has the `recorded` switches in place of those that follow from the config."""
        recorded = self.recorded(record)
        return replace(self, configured_as=lambda config: {**self._configured(config), **recorded})

    def _configured(self, config: Mapping[str, Any]) -> Variant:
        with self.failing("no switches follow from this config.json"):
            return self.configured_as(config)

    def _stored(self, shapes: Shapes) -> Variant:
        with self.failing("no switches follow from the stored tensors"):
            return self.stored_as(shapes)

    def _switches(self) -> tuple[dict[str, Any], bool]:
        """Return the switches that `tree` names, with their defaults, and whether it takes others."""
        keywords = list(inspect.signature(self.tree).parameters.values())[1:]
        named = {keyword.name: keyword.default for keyword in keywords if keyword.kind is not keyword.VAR_KEYWORD}
        return named, len(named) < len(keywords)

    @property
    def switches(self) -> Variant:
        """Return the family's switches with their defaults; None leaves the choice to the checkpoint."""
        named, _ = self._switches()
        defaults = {name: None if value is inspect.Parameter.empty else value for name, value in named.items()}
        return {**defaults, **self.variant}

    def check_variant(self, variant: Variant) -> None:
        """Raise `MappingError` for switches that the family does not have, or for values of another type."""
        known, takes_others = self._switches()
        if not takes_others and (unknown := [name for name in variant if name not in known]):
            there_are = f"it has {', '.join(known)}" if known else "it has none"
            raise MappingError(f"{self.name} has no switch {unknown[0]!r}{hint(unknown[0], known)}; {there_are}")
        for name, value in variant.items():
            default = known.get(name)
            if isinstance(default, bool | int) and type(value) is not type(default):
                raise MappingError(f"{self.name}: expected a {type(default).__name__} for {name}, found {value!r}")


def switches_of(variant: Variant | None) -> Variant:
    """Return a caller's `variant`, {} for None; raise `MappingError` if it is not a dict of switches by name."""
    if variant is None:
        return {}
    if not isinstance(variant, Mapping) or not all(isinstance(name, str) for name in variant):
        raise MappingError(f"variant: expected a dict, as {{'scan_layers': True}}, found {variant!r:.80}")
    return variant


def wrapper_of(family: Family | None, variant: Variant | None) -> StateWrapper:
    """Return the wrapper of a family's variant, or an empty wrapper without a family."""
    return StateWrapper() if family is None else family.wrapper.of({**family.variant, **switches_of(variant)})


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _counts(config: Mapping[str, Any], variant: Variant) -> str:
    """Return how many layers, experts and heads a config names, the largest number first, for a message."""
    named = {**config, **variant}
    if isinstance(text := config.get("text_config"), Mapping):
        named |= text
    counts = {key: value for key, value in named.items() if type(value) is int and key.startswith(("num_", "n_"))}
    largest = sorted(counts, key=counts.__getitem__, reverse=True)
    return f" ({some([f'{key} = {counts[key]}' for key in largest])})" if counts else ""
