"""`RestorePlan`: what a restore costs the processes that a plan looks at."""

from __future__ import annotations

from dataclasses import dataclass

from orbax_safetensors.errors import printable
from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.transfer.estimate import TimeEstimate, estimate
from orbax_safetensors.transfer.figures import FileReads, OverRead, restore_plan_json

# Plans report leaves that make at least this part of all requests, if these are many and bring fewer bytes than this
# each: then latency, or the work for each request, takes longer than the bytes.
REPORTED_REQUESTS = 0.1
MANY_REQUESTS = 1000  # of each process
SHORT_REQUEST_BYTES = 2**20


@dataclass(frozen=True)
class ProcessCost(OverRead):
    """What a restore costs one process.

    Attributes:
      process: its number.
      needed_bytes: bytes of the files that its shards hold, each counted once.
      read_bytes: bytes that its requests cover.
      num_requests: storage operations.
      staging_bytes: memory that its threads copy through.
      destination_bytes: memory of its distinct shards. CPU devices with the same shard share this memory; each
        accelerator holds a copy.
      files: the bytes and requests for each file that it reads.
    """

    process: int
    needed_bytes: int
    read_bytes: int
    num_requests: int
    staging_bytes: int
    destination_bytes: int
    files: tuple[FileReads, ...]


@dataclass(frozen=True)
class ShardSize:
    """Elements and bytes of the whole tree that one device holds."""

    params: int
    nbytes: int


@dataclass(frozen=True)
class LeafReads(OverRead):
    """What is read of a leaf: sums over the processes that the plan looks at.

    What several leaves use counts for the first of them.
    """

    name: str
    needed_bytes: int
    read_bytes: int
    num_requests: int


@dataclass(frozen=True)
class LeavesByWay:
    """The leaves that are made of stored bytes in the same way, as `reordered on the device`.

    `nbytes` are those of the whole leaves. A way on the host says why devices do not do it, if they are no CPUs.
    """

    way: str
    num_arrays: int
    nbytes: int


@dataclass(frozen=True)
class RestorePlan:
    """What a restore will cost. Printed, a plan has its main figures in a few lines.

    ```python
    mesh = jax.sharding.AbstractMesh((8,), ("model",))
    plan = ost.plan_restore("/models/llama", NamedSharding(mesh, P()), process_count=2)
    print(plan)
    for cost in plan.processes:
        print(f"process {cost.process} reads {cost.over_read:.2f} times the bytes that it needs")
    ```

    Attributes:
      total_params: elements of the whole tree.
      total_bytes: bytes of the whole tree in the dtypes of the restore.
      num_arrays: leaves of the tree.
      largest_shard: what the device with the most bytes holds. Devices count by their place in the mesh, as if all
        leaves were sharded over the same mesh.
      smallest_shard: what the device with the fewest bytes holds: the same if every dimension divides evenly.
      process_count: how many processes restore.
      processes: the cost for each process that the plan looks at, the first and the last among them.
      over_reads: leaves for which these processes read more than 1.1 times the needed bytes, the worst first.
      most_requests: the leaves that make at least a tenth of their requests, those with the most first, if a process
        makes more than 1,000 on average, for less than 1 MiB each.
      ways: how leaves are made of stored bytes, on the first process: the way of most bytes first. The devices of an
        abstract mesh count as GPUs unless its `abstract_device` is a TPU.
      open_requests: what each process requests to open the checkpoint, before any of its `num_requests`: the listing,
        the index and the headers.
    """

    total_params: int
    total_bytes: int
    num_arrays: int
    largest_shard: ShardSize
    smallest_shard: ShardSize
    process_count: int
    processes: tuple[ProcessCost, ...]
    over_reads: tuple[LeafReads, ...]
    most_requests: tuple[LeafReads, ...]
    ways: tuple[LeavesByWay, ...]
    open_requests: int = 0

    def __str__(self) -> str:
        most = max(self.processes, key=lambda cost: cost.read_bytes)
        lines = [
            f"restore of {human_bytes(self.total_bytes)}: arrays {self.num_arrays:,}, parameters "
            f"{self.total_params:,}, processes {self.process_count:,}",
            f"process {most.process} reads most: {human_bytes(most.read_bytes)}, requests {most.num_requests:,}, "
            f"over-read {most.over_read:.2f}",
        ]
        lines += [
            f"over-read most: {printable(leaf.name)}, reads {human_bytes(leaf.read_bytes)} and needs "
            f"{human_bytes(leaf.needed_bytes)}"
            for leaf in self.over_reads[:1]
        ]
        lines += [f"{each.way}: {human_bytes(each.nbytes)}" for each in self.ways]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the plan as a JSON object with the names of the attributes."""
        return restore_plan_json(self)


def estimate_time(plan: RestorePlan, *, bandwidth: float, latency: float = 0.0, streams: int = 1) -> TimeEstimate:
    """Return how long the reads of `plan` take if storage serves every process equally.

    ```python
    mesh = jax.sharding.AbstractMesh((8,), ("model",))
    plan = ost.plan_restore("/models/llama", NamedSharding(mesh, P()), process_count=2)
    print(ost.estimate_time(plan, bandwidth=2e9, latency=0.01, streams=64).seconds)
    ```

    Args:
      plan: a result of `plan_restore`.
      bandwidth: bytes per second for each process, over all its requests.
      latency: seconds from a request to its first byte.
      streams: requests that a process has in flight at once; a restore has `SafetensorsOptions.threads`.

    Raises:
      SafetensorsError: a number is out of range.
    """
    traffic = {cost.process: (cost.read_bytes, cost.num_requests) for cost in plan.processes}
    return estimate(traffic, bandwidth, latency, streams)
