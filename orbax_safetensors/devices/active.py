"""`ActiveProcesses`: the processes that save together, all of a program or those that Orbax's options name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import orbax.checkpoint as ocp

from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.format.names import some


@dataclass(frozen=True)
class ActiveProcesses:
    """Processes of a program that do something together, among them this one.

    Attributes:
      indices: their `jax.process_index()`, in order.
      primary: the process that does what only one has to do.
      prefix: of the keys of their agreements; what else is saved at the same time has another one.
    """

    indices: tuple[int, ...]
    primary: int
    prefix: str = ""

    @staticmethod
    def all() -> ActiveProcesses:
        """Return all processes of the program."""
        return ActiveProcesses(tuple(range(jax.process_count())), 0)

    @staticmethod
    def of(options: ocp.options.MultiprocessingOptions) -> ActiveProcesses:
        """Return the processes that save with this one; with `primary_host=None`, this one alone.

        Raises `SafetensorsError` if there are no such processes, or if this process or the primary one is not active.
        """
        here, everyone = jax.process_index(), set(range(jax.process_count()))
        active = everyone if options.active_processes is None else set(options.active_processes)
        if not active <= everyone:
            raise SafetensorsError(
                f"MultiprocessingOptions: active_processes has {some(sorted(active - everyone))}, and there are "
                f"{len(everyone)} processes"
            )
        primary = here if options.primary_host is None else options.primary_host
        for what, process in (("this process", here), ("primary_host", primary)):
            if process not in active:
                raise SafetensorsError(
                    f"MultiprocessingOptions: {what} is {process}, which is not in active_processes: "
                    f"{some(sorted(active))}"
                )
        indices = (here,) if options.primary_host is None else tuple(sorted(active))
        return ActiveProcesses(indices, primary, options.barrier_sync_key_prefix or "")

    @property
    def count(self) -> int:
        """Return how many processes there are."""
        return len(self.indices)

    @property
    def rank(self) -> int:
        """Return how many active processes come before this one."""
        return self.indices.index(jax.process_index())

    @property
    def is_primary(self) -> bool:
        """Return whether this is the process that does what only one has to do."""
        return jax.process_index() == self.primary

    def by_primary(self, do: Callable[[], object]) -> Callable[[], object]:
        """Return `do` in the primary process, and a function that does nothing in the others."""
        return do if self.is_primary else _nothing


def _nothing() -> None:
    """Do what processes do while another one acts for all."""
