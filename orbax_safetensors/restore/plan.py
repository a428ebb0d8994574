"""`plan_restore`: a restore up to the point where bytes would move, counted for every process in several ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.family import AskedFamily, mapped
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.cost.advice import Advisor, Instead
from orbax_safetensors.cost.counter import ShardedLeaf
from orbax_safetensors.cost.restore import Cooperation, RestorePlan, WayCost, restore_plan
from orbax_safetensors.devices.sharding import by_process, device_boxes, device_owners, num_processes, plain
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore import replicas, request
from orbax_safetensors.restore.exchanges import Chooser, Swap, exchangeable
from orbax_safetensors.restore.target import Target
from orbax_safetensors.storage.memory import no_collection
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.store import Pace


def plan_restore(
    path: PathLike,
    target: Any,
    *,
    family: AskedFamily = None,
    variant: Mapping[str, Any] | None = None,
    process_count: int | None = None,
    options: SafetensorsOptions | None = None,
) -> RestorePlan:
    """What restoring `target` will cost each process, from the headers alone.

    The figures are those of the restore, exactly, with two exceptions: to accelerators it goes in batches of half of
    `in_flight_bytes`, and so does what devices exchange, between which requests are not joined; and with `alias` it
    reads nothing of what it maps.
    Shardings that do not divide a dimension are planned as XLA would cut it, although JAX refuses to restore them. As
    in a restore, 64-bit dtypes count as 32 bits unless x64 is enabled.

    Args:
      path: a checkpoint, as for `open_checkpoint`.
      target: a tree of `jax.ShapeDtypeStruct` with shardings, or of `ocp.ArrayRestoreArgs`; every tensor of the
        checkpoint that it does not name is left out. An abstract mesh will do.
      family, variant: as for `SafetensorsRestore`.
      process_count: how many processes the devices of each mesh are dealt to, evenly and in order. Without it, the
        devices say whose they are, and those of an abstract mesh are all of one process.
      options: those that the restore will have.

    Raises:
      TensorMismatchError: the target does not fit the checkpoint, or devices cannot be dealt evenly.
      MappingError: there is no such family, or it does not fit the checkpoint.
      StorageError, HeaderError, IndexFileError: as for `open_checkpoint`.
    """
    options = options or SafetensorsOptions()
    with no_collection():
        checkpoint = mapped(
            read_checkpoint(path, options.storage_options),
            family,
            variant,
            complete=False,
            dequantize=options.dequantize,
        )
        return distribution(checkpoint, target, process_count, options).plan()


@dataclass(frozen=True)
class Distribution:
    """A tree of targets, and what each of `process_count` processes holds of it.

    `shardings` are those of the leaves, None if a leaf has none; `owners` are the processes of their devices if these
    can exchange what is read of a leaf, otherwise None. `dealt_evenly` says that devices are given to processes
    evenly and in order, rather than by what they say themselves.
    """

    checkpoint: Checkpoint
    leaves: tuple[ShardedLeaf, ...]
    shardings: tuple[jax.sharding.Sharding | None, ...]
    owners: tuple[tuple[int, ...] | None, ...]
    process_count: int
    dealt_evenly: bool
    options: SafetensorsOptions

    @property
    def files(self) -> list[str]:
        """Paths of the checkpoint's files."""
        return [file.path for file in self.checkpoint.files]

    @property
    def pace(self) -> Pace:
        """How the checkpoint's store is asked."""
        options = self.options
        return self.checkpoint.store.cost.pace(options.threads, options.max_gap_bytes, options.in_flight_bytes)

    @cached_property
    def possible(self) -> list[Swap | None]:
        """For each leaf how devices would exchange it, None where that saves no bytes."""
        if self.process_count == 1:
            return [None] * len(self.leaves)
        chooser = Chooser(self.checkpoint.location, len(self.files), process_count=self.process_count, pace=self.pace)
        return chooser.choose(self.leaves, self.shardings, self.owners)

    @property
    def chosen(self) -> list[Swap | None]:
        """Those of the possible exchanges that the restore makes: all or none."""
        return self.possible if cooperates(self.options) else [None] * len(self.leaves)

    def plan(self, *, compared: bool = False) -> RestorePlan:
        """What it costs every process.

        With `compared` also what cooperation would save where the options rule it out.
        """
        direct = self._plan([None] * len(self.leaves))
        if self.process_count == 1 or not (compared or cooperates(self.options)):
            return direct
        count = sum(swap is not None for swap in self.possible)
        cooperative = self._plan(self.possible) if count else direct
        return replace(
            cooperative if cooperates(self.options) else direct,
            cooperation=Cooperation(
                num_arrays=count,
                direct=_way_costs(direct, [0] * self.process_count),
                cooperative=_way_costs(cooperative, self._received_bytes()),
            ),
        )

    def _received_bytes(self) -> list[int]:
        """What the devices of every process receive from others where all that is possible is exchanged."""
        by_swap: dict[Swap, int] = {}  # bytes of one device
        for leaf, swap in zip(self.leaves, self.possible, strict=True):
            if swap is not None:
                by_swap[swap] = by_swap.get(swap, 0) + swap.received * leaf.dtype.itemsize
        out = np.zeros(self.process_count, np.int64)
        for swap, nbytes in by_swap.items():
            out += nbytes * np.bincount(swap.owners, minlength=self.process_count)
        received: list[int] = out.tolist()
        return received

    def _plan(self, swaps: Sequence[Swap | None]) -> RestorePlan:
        """`plan`, where these leaves are exchanged."""
        return restore_plan(
            [
                leaf if swap is None else replace(leaf, parts=swap.boxes)
                for swap, leaf in zip(swaps, self.leaves, strict=True)
            ],
            self.checkpoint.location,
            self.files,
            process_count=self.process_count,
            max_gap_bytes=self.pace.max_gap_bytes,
            threads=self.pace.requests,
            max_request_bytes=self.pace.max_request_bytes,
        )

    def instead(self, plan: RestorePlan) -> dict[str, tuple[Instead, ...]]:
        """For each of the `over_reads` of its plan what other shardings would read; see `Advisor.instead`."""
        advisor = Advisor(
            self.checkpoint.location,
            len(self.files),
            process_count=self.process_count,
            max_gap_bytes=self.pace.max_gap_bytes,
        )
        given = {leaf.name: (leaf, sharding) for leaf, sharding in zip(self.leaves, self.shardings, strict=True)}
        count = self.process_count if self.dealt_evenly else None
        out = {}
        for worst in plan.over_reads:
            leaf, sharding = given[worst.name]
            if sharding is not None:
                out[worst.name] = advisor.instead(leaf, sharding, device_owners(sharding, leaf.shape, count))
        return out


def cooperates(options: SafetensorsOptions) -> bool:
    """Whether devices exchange what processes read. Memory that is shared with a file is not read."""
    return options.cooperative and not options.alias


def _way_costs(plan: RestorePlan, received: Sequence[int]) -> tuple[WayCost, ...]:
    return tuple(
        WayCost(cost.read_bytes, cost.num_requests, nbytes)
        for cost, nbytes in zip(plan.processes, received, strict=True)
    )


def distribution(
    checkpoint: Checkpoint, target: Any, process_count: int | None, options: SafetensorsOptions
) -> Distribution:
    """Check a target and deal its shards; see `plan_restore` for the arguments and errors."""
    item, restore_args = (None, target) if request.are_restore_args(target) else (target, None)
    return distribution_of(
        checkpoint, request.resolve(checkpoint, item, restore_args, partial=True).targets, process_count, options
    )


def distribution_of(
    checkpoint: Checkpoint, targets: Sequence[Target], process_count: int | None, options: SafetensorsOptions
) -> Distribution:
    """Deal the shards of targets to processes; `process_count` is as in `plan_restore`."""
    shardings = [None if target.sharding is None else plain(target.sharding) for target in targets]
    count = num_processes(shardings, process_count)
    boxes: dict[tuple[Any, ...], list[tuple[Box, ...]]] = {}
    owners: dict[jax.sharding.Sharding, tuple[int, ...]] = {}
    leaves, owners_of_leaves = [], []
    for target, sharding in zip(targets, shardings, strict=True):
        key = (target.kind, sharding, target.shape)
        if key not in boxes:
            boxes[key] = _boxes(target, sharding, process_count, count)
        readers = replicas.readers(target, process_count)
        leaves.append(ShardedLeaf(target.name, target.view, target.shape, target.dtype, boxes[key], readers))
        own = None
        if sharding is not None and exchangeable(target):
            if sharding not in owners:
                owners[sharding] = tuple(device_owners(sharding, target.shape, process_count))
            own = owners[sharding]
        owners_of_leaves.append(own)
    return Distribution(
        checkpoint,
        tuple(leaves),
        tuple(shardings),
        tuple(owners_of_leaves),
        count,
        process_count is not None,
        options,
    )


def _boxes(
    target: Target, sharding: jax.sharding.Sharding | None, process_count: int | None, count: int
) -> list[tuple[Box, ...]]:
    """For each of `count` processes the boxes of its devices."""
    whole = Box.whole(target.shape)
    if sharding is None:  # every process has a NumPy array, the first the default device
        return [(whole,) if target.kind is not jax.Array or process == 0 else () for process in range(count)]
    try:
        boxes = device_boxes(sharding, target.shape)
        owners = device_owners(sharding, target.shape, process_count)
    except TensorMismatchError as error:
        raise TensorMismatchError(f"{target.name!r}: {error}") from error
    return by_process(boxes, owners, count)
