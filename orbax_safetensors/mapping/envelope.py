"""What stands around a family's tree in a checkpoint of Orbax: MaxText keeps a training state there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orbax_safetensors.mapping.family import Family

_MAXTEXT = "maxtext."


@dataclass(frozen=True)
class Envelope:
    """A tree of a checkpoint that holds a model's own tree.

    Attributes:
      above: what the names of the model's leaves begin with in the checkpoint.
      custom_metadata: of the checkpoint; None if there is none.
    """

    above: str = ""
    custom_metadata: dict[str, Any] | None = None

    def around(self, tree: Any) -> Any:
        """The checkpoint's tree, given the model's; scalars in it are Python's."""
        return {"step": 0, "params": tree, "opt_state": {}} if self.above else tree


def is_maxtext(family: Family | None) -> bool:
    """Whether checkpoints of a family are MaxText's."""
    return family is not None and family.name.startswith(_MAXTEXT)


def envelope(family: Family | None, variant: Mapping[str, Any] | None) -> Envelope:
    """The envelope of a family's trees."""
    if family is None or not is_maxtext(family):
        return Envelope()
    switches = {**family.variant, **(variant or {})}
    return Envelope("params.", {"scan_layers": bool(switches.get("scan_layers", True))})
