"""`Envelope`: the tree around a family's tree in a checkpoint of Orbax, such as a training state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# The key of custom metadata under which a conversion records the family and its switches.
RECORD_KEY = "orbax_safetensors"


@dataclass(frozen=True)
class Envelope:
    """A checkpoint's tree that holds a family's tree. By default, the checkpoint's tree is the family's tree.

    ```python
    envelope = ost.mapping.Envelope(key="params", rest={"step": 0})
    print(envelope.around({"embedding": 1}))  # {'step': 0, 'params': {'embedding': 1}}
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

    def of(self, variant: Mapping[str, Any]) -> Envelope:
        """Return the envelope with the switches of a variant."""
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
