"""A restore up to the point where bytes would move: what it asks of every process, to be counted in several ways."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from orbax_safetensors import arrays, replicas, targets
from orbax_safetensors.advice import Advisor, Instead, deal
from orbax_safetensors.checkpoint import Checkpoint
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.io.store import Pace
from orbax_safetensors.leaves import Target
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.plan.report import Leaf, RestorePlan, restore_plan
from orbax_safetensors.plan.view import Box


@dataclass(frozen=True)
class Planned:
    """A target of a checkpoint, dealt to `process_count` processes.

    `shardings` are those of the leaves, None where a leaf has none. `dealt` says that devices are given to processes
    evenly and in order, rather than by what they say themselves.
    """

    checkpoint: Checkpoint
    leaves: tuple[Leaf, ...]
    shardings: tuple[jax.sharding.Sharding | None, ...]
    process_count: int
    dealt: bool
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

    def plan(self) -> RestorePlan:
        """What it costs every process."""
        return restore_plan(
            self.leaves,
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
            self.files,
            process_count=self.process_count,
            max_gap_bytes=self.pace.max_gap_bytes,
        )
        given = {leaf.name: (leaf, sharding) for leaf, sharding in zip(self.leaves, self.shardings, strict=True)}
        count = self.process_count if self.dealt else None
        out = {}
        for worst in plan.over_reads:
            leaf, sharding = given[worst.name]
            if sharding is not None:
                out[worst.name] = advisor.instead(leaf, sharding, arrays.device_owners(sharding, leaf.shape, count))
        return out


def planned(checkpoint: Checkpoint, target: Any, process_count: int | None, options: SafetensorsOptions) -> Planned:
    """Checks a target and deals its shards; see `api.plan_restore` for the arguments and errors."""
    item, restore_args = (None, target) if targets.are_restore_args(target) else (target, None)
    request = targets.resolve(checkpoint, item, restore_args, partial=True)
    shardings = [None if wanted.sharding is None else arrays.plain(wanted.sharding) for wanted in request.targets]
    with_devices = any(sharding is not None and not arrays.is_abstract(sharding) for sharding in shardings)
    # Asking JAX for its processes starts it, which a plan on abstract meshes must not.
    started = with_devices or jax.distributed.is_initialized()
    count = process_count or (jax.process_count() if started else 1)
    boxes: dict[tuple[Any, ...], list[tuple[Box, ...]]] = {}
    leaves = []
    for wanted, sharding in zip(request.targets, shardings, strict=True):
        key = (wanted.kind, sharding, wanted.shape)
        if key not in boxes:
            boxes[key] = _boxes(wanted, sharding, process_count, count)
        readers = replicas.readers(wanted, process_count)
        leaves.append(Leaf(wanted.name, wanted.view, wanted.shape, wanted.dtype, boxes[key], readers))
    return Planned(checkpoint, tuple(leaves), tuple(shardings), count, process_count is not None, options)


def _boxes(
    wanted: Target, sharding: jax.sharding.Sharding | None, process_count: int | None, count: int
) -> list[tuple[Box, ...]]:
    """For each of `count` processes the boxes of its devices."""
    whole: Box = tuple((0, size) for size in wanted.shape)
    if sharding is None:  # every process has a NumPy array, the first the default device
        return [(whole,) if wanted.kind is not jax.Array or process == 0 else () for process in range(count)]
    try:
        boxes = arrays.device_boxes(sharding, wanted.shape)
        owners = arrays.device_owners(sharding, wanted.shape, process_count)
    except TensorMismatchError as error:
        raise TensorMismatchError(f"{wanted.name!r}: {error}") from error
    return deal(boxes, owners, count)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Holds the cyclic garbage collector. It would look through all names and shapes again and again, in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
