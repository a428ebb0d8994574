"""`Envelope`: what stands around a family's tree in a checkpoint of Orbax, such as a training state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Envelope:
    """A tree of a checkpoint that holds a family's tree. By default the one is the other.

    Attributes:
      key: the key of the family's tree in the checkpoint's.
      rest: what else the checkpoint's tree has, by key: Python's scalars and empty nodes.
      switches: those of the family's that the checkpoint's custom metadata tells, with their values.
      root: what the names of all leaves of the family begin with.
      found_below: what stands there instead in the names of a checkpoint; the first that any name begins with counts.
    """

    key: str = ""
    rest: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, Any] = field(default_factory=dict)
    root: str = ""
    found_below: tuple[str, ...] = ("",)

    @property
    def above(self) -> str:
        """What the names of the family's leaves begin with in the checkpoint that is made."""
        return f"{self.key}." if self.key else ""

    @property
    def custom_metadata(self) -> dict[str, Any] | None:
        """That of the checkpoint that is made; None if there is none."""
        return dict(self.switches) or None

    def of(self, variant: Mapping[str, Any]) -> Envelope:
        """Return the envelope with the switches of a variant."""
        return replace(self, switches={name: variant.get(name, value) for name, value in self.switches.items()})

    def around(self, tree: Any) -> Any:
        """Return the checkpoint's tree, given the family's."""
        return {**self.rest, self.key: tree} if self.key else tree

    def variant(self, custom_metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return the switches that a checkpoint's metadata tells."""
        return {name: custom_metadata[name] for name in self.switches if name in custom_metadata}

    def leaves(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names of the family's leaves in a checkpoint that has these `names`, and which of these they are.

        What else is in the checkpoint is left out.
        """
        names = list(names)
        below = next((own for own in self.found_below if any(name.startswith(own) for name in names)), "")
        return {self.root + name.removeprefix(below): name for name in names if name.startswith(below)}
