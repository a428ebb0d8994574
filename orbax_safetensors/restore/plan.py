"""`plan_restore`: what a restore costs every process, direct and cooperative, counted before any byte moves."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.described import read_for_plan
from orbax_safetensors.checkpoint.family import FamilyLike, mapped
from orbax_safetensors.cost.advice import Advisor, Instead
from orbax_safetensors.cost.counter import ShardedLeaf
from orbax_safetensors.cost.restore import Cooperation, ProcessReads, RestorePlan, restore_plan
from orbax_safetensors.devices.sharding import by_process, device_boxes, device_owners, num_processes, plain
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore import replicas, request, variants
from orbax_safetensors.restore.exchanges import Chooser, Swap, exchangeable
from orbax_safetensors.restore.target import Target
from orbax_safetensors.storage.memory import no_collection
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.store import Pace


@no_collection()
def plan_restore(
    path: PathLike,
    target: Any,
    *,
    family: FamilyLike = None,
    variant: Mapping[str, Any] | None = None,
    process_count: int | None = None,
    options: SafetensorsOptions | None = None,
) -> RestorePlan:
    """Return what restoring `target` will cost each process; reads headers only.

    The figures are exactly those of the restore, with these exceptions:

    - A restore to accelerators goes in batches, and parts of long leaves, and joins no requests of two of them. What
      it maps counts as ranges of at most 16 MiB, of which a tenth at most are gaps. A shard that is one long answer of
      a server is one request.
    - A restore whose devices exchange leaves goes in batches of half of `in_flight_bytes`.
    - With `alias`, a restore does not read what it maps.
    - Past the page cache, it may have more threads, with 2 MiB for each.

    If a sharding does not divide a dimension, the plan cuts the dimension as XLA would, although JAX refuses such a
    restore. As in a restore, 64-bit dtypes count as 32 bits unless x64 is enabled.

    Args:
      path: a checkpoint, as for `open_checkpoint`. With a family, also a `config.json`, or a directory with one and no
        files yet: the plan is then that of the files that a save of the model would write, in the config's dtype.
      target: a tree of `jax.ShapeDtypeStruct` with shardings, or of `ocp.ArrayRestoreArgs`. Their mesh may be
        abstract. The plan leaves out every tensor that the tree does not name. Or a sharding, or a function to
        shardings, as for `load`.
      family, variant: as for `SafetensorsRestore`.
      process_count: how many processes share the devices of each mesh, evenly and in order. By default each device
        belongs to its actual process, and all devices of an abstract mesh belong to one.
      options: the options of the restore.

    Raises:
      TensorMismatchError: the target does not fit the checkpoint, or processes cannot share the devices evenly.
      MappingError: there is no such family, or it does not fit the checkpoint.
      StorageError, HeaderError, IndexFileError: as for `open_checkpoint`.
    """
    options = options or SafetensorsOptions()
    stored = read_for_plan(path, family, variant, options.storage_options)
    item, restore_args, sharding_of = request.of_target(target)
    if sharding_of is None:
        checkpoint, resolved = variants.resolved(
            stored,
            item,
            restore_args,
            partial=True,
            family=family,
            variant=variant,
            dequantize=options.dequantize,
        )
    else:
        checkpoint = mapped(stored, family, variant, complete=True, dequantize=options.dequantize)
        resolved = request.everything(checkpoint, sharding_of)
    return distribution_of(checkpoint, resolved.targets, process_count, options).plan()


@dataclass(frozen=True)
class Distribution:
    """A tree of targets, and what each of `process_count` processes holds of it.

    Attributes:
      shardings: of the leaves, None if a leaf has none.
      owners: the processes of each leaf's devices, None if these cannot exchange parts of the leaf.
      dealt_evenly: devices belong to processes evenly and in order, instead of each to its actual process.
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
        """Return the paths of the checkpoint's files."""
        return [file.path for file in self.checkpoint.files]

    @property
    def pace(self) -> Pace:
        """Return the pace at which a restore requests from the checkpoint's store."""
        options = self.options
        return self.checkpoint.store.cost.pace(options.threads, options.max_gap_bytes, options.in_flight_bytes)

    @cached_property
    def possible(self) -> list[Swap | None]:
        """Return the exchange of each leaf, None if an exchange saves no bytes."""
        if self.process_count == 1:
            return [None] * len(self.leaves)
        chooser = Chooser(self.checkpoint.location, len(self.files), process_count=self.process_count, pace=self.pace)
        return chooser.choose(self.leaves, self.shardings, self.owners)

    @property
    def chosen(self) -> list[Swap | None]:
        """Return the exchanges that the restore makes: all that are possible, or none."""
        return self.possible if cooperates(self.options) else [None] * len(self.leaves)

    def plan(self, *, compared: bool = False) -> RestorePlan:
        """Return what the restore costs every process.

        With `compared`, the plan has what cooperation would save even if the options rule it out.
        """
        opening = self.checkpoint.opening
        direct = replace(
            self._plan([None] * len(self.leaves)),
            open_requests=opening.requests,
            open_requests_without_record=opening.requests_without_record,
        )
        if self.process_count == 1 or not (compared or cooperates(self.options)):
            return direct
        count = sum(swap is not None for swap in self.possible)
        cooperative = self._plan(self.possible) if count else direct
        return replace(
            cooperative if cooperates(self.options) else direct,
            cooperation=Cooperation(
                num_arrays=count,
                direct=_process_reads(direct, [0] * self.process_count),
                cooperative=_process_reads(cooperative, self._received_bytes()),
            ),
        )

    def _received_bytes(self) -> list[int]:
        """Return the bytes that the devices of every process receive from others with all possible exchanges."""
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
        """Return the plan of a restore with these exchanges."""
        return restore_plan(
            [
                leaf if swap is None else leaf._replace(parts=swap.boxes)
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
        """Return for each of the `over_reads` of `plan` what other shardings would read; see `Advisor.instead`."""
        advisor = Advisor(
            self.checkpoint.location,
            len(self.files),
            process_count=self.process_count,
            max_gap_bytes=self.pace.max_gap_bytes,
        )
        sharded = {leaf.name: (leaf, sharding) for leaf, sharding in zip(self.leaves, self.shardings, strict=True)}
        count = self.process_count if self.dealt_evenly else None
        out = {}
        for worst in plan.over_reads:
            leaf, sharding = sharded[worst.name]
            if sharding is not None:
                out[worst.name] = advisor.instead(leaf, sharding, device_owners(sharding, leaf.shape, count))
        return out


def cooperates(options: SafetensorsOptions) -> bool:
    """Return whether devices exchange what processes read; with `alias`, processes map instead of read."""
    return options.cooperative and not options.alias


def _process_reads(plan: RestorePlan, received: Sequence[int]) -> tuple[ProcessReads, ...]:
    return tuple(
        ProcessReads(cost.read_bytes, cost.num_requests, nbytes)
        for cost, nbytes in zip(plan.processes, received, strict=True)
    )


def distribution(
    checkpoint: Checkpoint, target: Any, process_count: int | None, options: SafetensorsOptions
) -> Distribution:
    """Check a target and assign its shards to processes; see `plan_restore` for the arguments and errors."""
    item, restore_args, _ = request.of_target(target)
    resolved = request.resolve(checkpoint, item, restore_args, partial=True)
    return distribution_of(checkpoint, resolved.targets, process_count, options)


def distribution_of(
    checkpoint: Checkpoint, targets: Sequence[Target], process_count: int | None, options: SafetensorsOptions
) -> Distribution:
    """Assign the shards of targets to processes; `process_count` is as in `plan_restore`."""
    shardings = [None if target.sharding is None else plain(target.sharding) for target in targets]
    count = num_processes(shardings, process_count)
    known: dict[Hashable, _Dealt] = {}
    leaves, owners = [], []
    for target, sharding in zip(targets, shardings, strict=True):
        key = (target.kind, target.sharding, target.shape, target.broadcast)
        dealt = known.get(key)
        if dealt is None:
            dealt = known[key] = _dealt(target, sharding, process_count, count)
        leaves.append(ShardedLeaf(target.name, target.view, target.shape, target.dtype, dealt.boxes, dealt.readers))
        owners.append(dealt.owners)
    return Distribution(
        checkpoint,
        tuple(leaves),
        tuple(shardings),
        tuple(owners),
        count,
        process_count is not None,
        options,
    )


class _Dealt(NamedTuple):
    """What leaves that are sharded alike have in common; `boxes` and `readers` are those of `ShardedLeaf`."""

    boxes: list[tuple[Box, ...]]
    readers: frozenset[int] | None
    owners: tuple[int, ...] | None


def _dealt(target: Target, sharding: jax.sharding.Sharding | None, process_count: int | None, count: int) -> _Dealt:
    boxes = _boxes(target, sharding, process_count, count)
    owners = None
    if sharding is not None and exchangeable(target):
        owners = tuple(device_owners(sharding, target.shape, process_count))
    return _Dealt(boxes, replicas.readers(target, process_count), owners)


def _boxes(
    target: Target, sharding: jax.sharding.Sharding | None, process_count: int | None, count: int
) -> list[tuple[Box, ...]]:
    """Return for each of `count` processes the boxes of its devices."""
    whole = Box.whole(target.shape)
    if sharding is None:  # every process has a NumPy array, the first the default device
        return [(whole,) if target.kind is not jax.Array or process == 0 else () for process in range(count)]
    try:
        boxes = device_boxes(sharding, target.shape)
        owners = device_owners(sharding, target.shape, process_count)
    except TensorMismatchError as error:
        raise TensorMismatchError(f"{target.name!r}: {error}") from error
    return by_process(boxes, owners, count)
