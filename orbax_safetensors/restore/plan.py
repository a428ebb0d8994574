"""`plan_restore`: what a restore costs processes, from the `TransferPlan`s that they would execute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.checkpoint.from_config import read_for_plan
from orbax_safetensors.devices.sharding import by_process, device_boxes, device_owners, num_processes, plain
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.restore import advice, replicas
from orbax_safetensors.restore.cost import (
    MANY_REQUESTS,
    REPORTED_REQUESTS,
    SHORT_REQUEST_BYTES,
    LeafReads,
    LeavesByWay,
    ProcessCost,
    RestorePlan,
    ShardSize,
)
from orbax_safetensors.restore.request import Partial, RestoreRequest
from orbax_safetensors.restore.run import match_through_family
from orbax_safetensors.restore.target import Target
from orbax_safetensors.restore.ways import ways_of
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.process_memory import no_collection
from orbax_safetensors.storage.store import RequestLimits
from orbax_safetensors.transfer.figures import REPORTED_OVER_READ, FileReads, Reads, looked_at
from orbax_safetensors.transfer.plan import TransferPlan


@no_collection()
def plan_restore(
    path: PathLike,
    target: Any,
    *,
    family: FamilyLike = None,
    variant: Mapping[str, Any] | None = None,
    dtype: DTypeLike | Mapping[str, DTypeLike] | None = None,
    partial: Partial = False,
    process_count: int | None = None,
    all_processes: bool = False,
    options: SafetensorsOptions | None = None,
) -> RestorePlan:
    """Return what restoring `target` will cost processes; reads headers only.

    ```python
    mesh = jax.sharding.AbstractMesh((64, 8), ("fsdp", "tensor"))  # 512 devices that need not exist
    plan = ost.plan_restore("/models/llama", NamedSharding(mesh, P()), process_count=64)
    print(plan.processes[0].read_bytes, plan.processes[0].num_requests)
    ```

    The figures are exactly those of the restore, with these exceptions:

    - A restore to accelerators reads in batches, and joins no ranges of two of them.
    - With `alias`, a restore does not read what it maps.
    - Past the page cache, it may have more threads, with 2 MiB for each.

    If a sharding does not divide a dimension, the plan cuts the dimension as XLA would, although JAX refuses such a
    restore. As in a restore, 64-bit dtypes count as 32 bits unless x64 is enabled.

    Args:
      path: a checkpoint, as for `open_checkpoint`. With a family, also a `config.json`, or a directory with one and no
        files yet: the plan is then that of the files that a save of the model would write, in the config's dtype.
      target (tree | jax.sharding.Mesh | jax.sharding.Sharding | Callable): a tree of `jax.ShapeDtypeStruct` with
        shardings, or of `ocp.ArrayRestoreArgs`; or a mesh, a sharding or a function, as for `load`. Meshes may be
        abstract. The plan leaves out every tensor that the tree does not name.
      family, variant: as for `SafetensorsRestore`.
      dtype, partial: as for `load`.
      process_count: how many processes share the devices of each mesh, evenly and in order. By default each device
        belongs to its actual process, and all devices of an abstract mesh belong to one.
      all_processes: look at all processes. By default, of more than four the plan looks at four, the first and the
        last among them: each takes seconds for a model of 45,000 tensors.
      options: the options of the restore.

    Raises:
      TensorMismatchError: the target does not fit the checkpoint, or processes cannot share the devices evenly.
      MappingError: there is no such family, or it does not fit the checkpoint.
      StorageError, HeaderError, IndexFileError: as for `open_checkpoint`.
    """
    request = RestoreRequest.of(path, target, family, variant, options, dtype, partial)
    stored = read_for_plan(request.path, family, variant, request.options.storage_options, partial=request.leaves_out)
    request = replace(request, partial=request.has_tree)
    checkpoint, matched = match_through_family(request, stored)
    return PlannedRestore(checkpoint, matched.targets, process_count, request.options, all_processes).plan()


@dataclass(frozen=True)
class PlannedRestore:
    """A restore by processes that need not exist.

    Attributes:
      dealt: to how many processes the devices are dealt; None if each device belongs to its actual process.
      all_processes: whether to plan the reads of all processes. See `plan_restore`, also for the errors.
    """

    checkpoint: Checkpoint
    targets: Sequence[Target]
    dealt: int | None
    options: SafetensorsOptions
    all_processes: bool = False

    @cached_property
    def process_count(self) -> int:
        """How many processes restore."""
        shardings = [None if target.sharding is None else plain(target.sharding) for target in self.targets]
        return num_processes(shardings, self.dealt)

    @cached_property
    def looked_at(self) -> tuple[int, ...]:
        """The processes whose reads are planned."""
        return looked_at(self.process_count, everyone=self.all_processes)

    @cached_property
    def limits(self) -> RequestLimits:
        """The limits of the requests of a restore to the checkpoint's store."""
        return self.checkpoint.request_limits(self.options)

    def transfer(self, process: int) -> TransferPlan:
        """Return what a process moves."""
        blocks = [
            target.block(box)
            for target, held in zip(self.targets, self._held_boxes, strict=True)
            for box in held.read(process)
        ]
        return self.checkpoint.transfer(blocks, self.limits)

    def plan(self) -> RestorePlan:
        """Return what the restore costs."""
        largest, smallest = self._shard_sizes()
        costs = []
        traffic = np.zeros((len(self.targets), 3), np.int64)
        for process in self.looked_at:  # one after the other: a plan of 45,000 tensors takes 100 MB
            transfer = self.transfer(process)
            costs.append(self._cost(process, transfer))
            self._add_traffic(process, transfer, traffic)
        leaves = [
            LeafReads(target.name, *figures) for target, figures in zip(self.targets, traffic.tolist(), strict=True)
        ]
        over_reads = [leaf for leaf in leaves if leaf.over_read > REPORTED_OVER_READ]
        _, read, requests = traffic.sum(axis=0).tolist()
        slow = requests > MANY_REQUESTS * len(costs) and read < SHORT_REQUEST_BYTES * requests
        least = REPORTED_REQUESTS * requests if slow else np.inf
        return RestorePlan(
            total_params=sum(prod(target.shape) for target in self.targets),
            total_bytes=sum(prod(target.shape) * target.dtype.itemsize for target in self.targets),
            num_arrays=len(self.targets),
            largest_shard=largest,
            smallest_shard=smallest,
            process_count=self.process_count,
            processes=tuple(costs),
            over_reads=tuple(sorted(over_reads, key=lambda leaf: leaf.needed_bytes - leaf.read_bytes)),
            most_requests=tuple(
                sorted((leaf for leaf in leaves if leaf.num_requests >= least), key=lambda leaf: -leaf.num_requests)
            ),
            ways=self._ways(),
            open_requests=self.checkpoint.open_requests,
        )

    def cheaper_shardings(self, plan: RestorePlan) -> dict[str, tuple[advice.CheaperSharding, ...]]:
        """Return what other shardings would read for each of the `over_reads` of `plan`, as in `restore/advice.py`."""
        targets = {target.name: target for target in self.targets}
        known: dict[object, tuple[advice.CheaperSharding, ...]] = {}
        out = {}
        for leaf in plan.over_reads:
            target = targets[leaf.name]
            form = advice.form(target, self.checkpoint.location)
            if form not in known:
                known[form] = advice.cheaper_shardings(target, self._reads)
            out[leaf.name] = known[form]
        return out

    def _ways(self) -> tuple[LeavesByWay, ...]:
        """Return how leaves are made of stored bytes on the first process."""
        boxes = [held.distinct[self.looked_at[0]] for held in self._held_boxes]
        num_arrays, nbytes = Counter[str](), Counter[str]()
        for target, way in zip(self.targets, map(str, ways_of(self.checkpoint, self.targets, boxes)), strict=True):
            num_arrays[way] += 1
            nbytes[way] += prod(target.shape) * target.dtype.itemsize
        return tuple([LeavesByWay(way, num_arrays[way], nbytes[way]) for way, _ in nbytes.most_common()])

    @cached_property
    def _held_boxes(self) -> list[_Boxes]:
        """What processes hold of each target; targets that are sharded alike share it."""
        known: dict[Hashable, _Boxes] = {}
        out = []
        for target in self.targets:
            key = (target.kind, target.sharding, target.shape, target.broadcast)
            if key not in known:
                known[key] = self._boxes_of(target)
            out.append(known[key])
        return out

    def _boxes_of(self, target: Target) -> _Boxes:
        readers = replicas.readers(target, self.dealt)
        if target.sharding is None:  # every process has a NumPy array, the first the default device
            count = self.process_count if target.kind is not jax.Array else 1
            return _Boxes([(Box.whole(target.shape),)] * count + [()] * (self.process_count - count), readers)
        try:
            sharding = plain(target.sharding)
            boxes = device_boxes(sharding, target.shape)
            owners = device_owners(sharding, target.shape, self.dealt)
        except TensorMismatchError as error:
            raise TensorMismatchError(f"{target.name!r}: {error}") from error
        return _Boxes(by_process(boxes, owners, self.process_count), readers)

    def _reads(self, target: Target) -> Reads:
        """Return what the processes that are looked at read of one leaf."""
        held = self._boxes_of(target)
        blocks = [[target.block(box) for box in held.read(process)] for process in self.looked_at]
        transfers = [self.checkpoint.transfer(read_here, self.limits) for read_here in blocks]
        return Reads(
            sum(transfer.needed_bytes for transfer in transfers), sum(transfer.moved_bytes for transfer in transfers)
        )

    def _cost(self, process: int, transfer: TransferPlan) -> ProcessCost:
        files = self.checkpoint.files
        volumes = {id(held): sum(box.volume for box in held.distinct[process]) for held in self._held_boxes}
        return ProcessCost(
            process,
            needed_bytes=transfer.needed_bytes,
            read_bytes=transfer.moved_bytes,
            num_requests=transfer.num_requests,
            staging_bytes=self.limits.requests * transfer.window_bytes,
            destination_bytes=sum(
                target.dtype.itemsize * volumes[id(held)]
                for target, held in zip(self.targets, self._held_boxes, strict=True)
            ),
            files=tuple([FileReads(files[number].path, *figures) for number, *figures in transfer.files]),
        )

    def _add_traffic(self, process: int, transfer: TransferPlan, traffic: np.ndarray) -> None:
        """Add the figures of `LeafReads` that a process has of each leaf."""
        leaf_of = np.repeat(np.arange(len(self.targets)), [len(held.read(process)) for held in self._held_boxes])
        blocks = np.array(transfer.blocks(), np.int64).reshape(-1, 4)
        np.add.at(traffic, leaf_of[blocks[:, 0]], blocks[:, 1:])

    def _shard_sizes(self) -> tuple[ShardSize, ShardSize]:
        """Return what the device with the most bytes and the one with the fewest hold of all leaves together."""
        held_of = {id(held): held for held in self._held_boxes}
        alike = Counter((id(held), target.dtype) for target, held in zip(self.targets, self._held_boxes, strict=True))
        devices = max((sum(map(len, held.boxes)) for held in held_of.values()), default=0)
        params, nbytes = np.zeros((2, max(devices, 1)), np.int64)
        for (number, dtype), count in alike.items():
            volumes = [box.volume for boxes in held_of[number].boxes for box in boxes]
            elements = np.array(volumes, np.int64) * count
            params[: len(elements)] += elements
            nbytes[: len(elements)] += elements * dtype.itemsize
        most, least = int(np.argmax(nbytes)), int(np.argmin(nbytes))
        return ShardSize(int(params[most]), int(nbytes[most])), ShardSize(int(params[least]), int(nbytes[least]))


@dataclass(frozen=True, eq=False)
class _Boxes:
    """The boxes of the devices of each process in leaves that are sharded alike; `readers` read theirs, or all do."""

    boxes: Sequence[tuple[Box, ...]]
    readers: frozenset[int] | None

    @cached_property
    def distinct(self) -> list[tuple[Box, ...]]:
        """The distinct boxes that each process holds."""
        return [tuple(dict.fromkeys(boxes)) for boxes in self.boxes]

    def read(self, process: int) -> tuple[Box, ...]:
        """Return the distinct boxes that a process reads."""
        return self.distinct[process] if self.readers is None or process in self.readers else ()
