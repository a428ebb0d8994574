"""`Family`: a convention for a model's tree together with a Hugging Face architecture, described as views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from orbax_safetensors.plan.view import View

# What `tensor` makes of a name and a shape while `Family.describe` runs.
Bind = Callable[[str, tuple[int, ...]], View]
_bind: ContextVar[Bind | None] = ContextVar("bind", default=None)

# The dtype of a tensor in a description. What is stored has its own, and so has what is saved.
UNKNOWN = np.dtype(np.void)


def tensor(name: str, shape: Sequence[int]) -> View:
    """The stored tensor `name`, which the config says has `shape`.

    While a checkpoint is opened or saved, it is that of the checkpoint, and the shape is checked.
    """
    bind = _bind.get()
    return View.tensor(name, shape, UNKNOWN) if bind is None else bind(name, tuple(shape))


class Tree(dict[str, View]):
    """What `Family.tree` returns where a plain dict does not say enough: views by tree path.

    Attributes:
      unused: regular expressions of stored names that no view uses and that are left out.
      optional: regular expressions of tree paths which are left out where none of their tensors is stored.
    """

    def __init__(self, leaves: Mapping[str, View], *, unused: Sequence[str] = (), optional: Sequence[str] = ()) -> None:
        super().__init__(leaves)
        self.unused = tuple(unused)
        self.optional = tuple(optional)


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
    """

    name: str
    architectures: tuple[str, ...]
    tree: Callable[..., Mapping[str, View]]
    renames: tuple[tuple[str, str], ...] = ()

    def describe(self, config: Mapping[str, Any], variant: Mapping[str, Any], bind: Bind) -> Tree:
        """`tree` with its tensors made by `bind`."""
        token = _bind.set(bind)
        try:
            tree = self.tree(config, **variant)
        finally:
            _bind.reset(token)
        return tree if isinstance(tree, Tree) else Tree(tree)
