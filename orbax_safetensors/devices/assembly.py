"""Arrays that devices put together from bytes as they lie in files, by programs that run on this process's devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_safetensors.devices.arrays import explicit_transfers, side_by_side
from orbax_safetensors.devices.bits import bit_width
from orbax_safetensors.devices.program import MAX_SIZE, Elements, Recipe, Zeros
from orbax_safetensors.devices.settings import own_settings
from orbax_safetensors.devices.sharding import box_of, local_boxes
from orbax_safetensors.storage.interrupts import to_the_end
from orbax_safetensors.storage.threads import Threads

_Program = Callable[..., jax.Array]


def can_assemble(sharding: jax.sharding.Sharding | Format | None, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Return whether devices can put an array together: in their usual memory and layout, of whole bytes."""
    if not isinstance(sharding, jax.sharding.Sharding) or not sharding.addressable_devices:
        return False
    if not shape or max(shape) > MAX_SIZE or dtype.kind == "c" or bit_width(dtype) < 8:
        return False
    devices: set[Any] = sharding.addressable_devices
    return all(sharding.memory_kind in (None, device.default_memory().kind) for device in devices)


class Programs:
    """Programs for recipes: compiled on threads, all at once, and kept for later restores."""

    def __init__(self) -> None:
        self._futures: dict[Any, Future[_Program]] = {}

    @cached_property
    def _threads(self) -> Threads:
        return Threads(os.cpu_count(), "compile")

    def compile(self, recipe: Recipe, sharding: jax.sharding.Sharding) -> None:
        """Begin to compile what an array of this sharding needs for `recipe`, unless that has begun."""
        devices = _devices(sharding)
        self._begin(recipe, devices)
        if not recipe.move.fills:
            for kind in (Zeros, Elements):
                self._begin(kind(recipe.shape, recipe.dtype), devices)

    def get(self, recipe: Elements | Recipe | Zeros, devices: tuple[Any, ...]) -> _Program:
        """Return a program for an array on `devices`; wait until it is compiled, or raise why it cannot be."""
        return self._begin(recipe, devices).result()

    def close(self) -> None:
        """Wait for what is being compiled, and give up the rest."""
        if self._futures:
            to_the_end(partial(self._threads.shutdown, cancel_futures=True))
        self._futures.clear()  # the traceback of one that has failed holds the memory of a restore, and this object

    def _begin(self, recipe: Elements | Recipe | Zeros, devices: tuple[Any, ...]) -> Future[_Program]:
        key = recipe, devices
        if key not in self._futures:
            self._futures[key] = self._threads.submit(_compiled, recipe, devices)
        return self._futures[key]


class Assembly:
    """An array whose shards devices make of packed bytes, piece by piece.

    Devices hold the bytes of a few pieces on top of the shards. What no piece fills is zero.
    """

    def __init__(
        self, programs: Programs, sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self._programs, self._sharding, self._shape, self._dtype = programs, sharding, shape, dtype
        self._devices = _devices(sharding)
        self._by_device = _by_device(self._devices)
        boxes = local_boxes(sharding, shape)
        self._indices: Mapping[Any, Any] = sharding.addressable_devices_indices_map(shape)
        self._box_numbers = [boxes.index(box_of(self._indices[device], shape)) for device in self._devices]
        # Shards lie one below the other, because a program runs on one array.
        self._words: jax.Array | None = None
        self._elements: jax.Array | None = None

    def put(
        self, recipe: Recipe, starts: Sequence[tuple[int, ...]], packed: Sequence[Sequence[np.ndarray]]
    ) -> list[jax.Array]:
        """Have devices write a box of their shards. Return the arrays that are on their way to them.

        The memory of `packed` must stay as it is until these arrays are ready.

        Args:
          recipe: what to make of the bytes.
          starts: where the box begins, for each of `sharding.local_boxes`; not read if the move fills shards.
          packed: for each of `sharding.local_boxes`, the bytes of each of `recipe.inputs` as one array of uint8.
        """
        program = self._programs.get(recipe, self._devices)
        with explicit_transfers(), own_settings():
            sent = [
                self._send([arrays[number].view(dtype).reshape(1, *shape) for arrays in packed])
                for number, (shape, dtype) in enumerate(recipe.inputs)
            ]
            if not recipe.move.fills:
                begins = self._send([np.array([start], np.int32) for start in starts])
                self._words = program(self._begun(), begins, *sent)
            else:
                self._elements = program(*sent)
        return sent

    def array(self) -> jax.Array:
        """Return the array, once all pieces are put."""
        if self._elements is None:
            with own_settings():
                self._elements, self._words = self._program(Elements)(self._begun()), None
        shards: dict[Any, Any] = {shard.device: shard.data for shard in self._elements.addressable_shards}
        return jax.make_array_from_single_device_arrays(
            self._shape, self._sharding, [shards[device] for device in self._indices], dtype=self._dtype
        )

    def _begun(self) -> jax.Array:
        """Return the words of the shards, zeros if nothing is put yet."""
        return self._program(Zeros)() if self._words is None else self._words

    def _program(self, kind: type[Elements] | type[Zeros]) -> _Program:
        shape = self._sharding.shard_shape(self._shape)
        return self._programs.get(kind(shape, self._dtype), self._devices)

    def _send(self, by_box: Sequence[np.ndarray]) -> jax.Array:
        return side_by_side(self._by_device, [by_box[number] for number in self._box_numbers])


def _devices(sharding: jax.sharding.Sharding) -> tuple[Any, ...]:
    """Return the devices of this process, in one order for all shardings: they share programs."""
    devices: set[Any] = sharding.addressable_devices
    return tuple(sorted(devices, key=lambda device: device.id))


@lru_cache
def _by_device(devices: tuple[Any, ...]) -> NamedSharding:
    """Return the sharding of an array with a part for each device, one below the other."""
    return NamedSharding(Mesh(np.array(devices, object), ("device",)), PartitionSpec("device"))


# Each of a model's kinds of leaves has one or two.
@lru_cache(maxsize=2**10)
def _compiled(recipe: Elements | Recipe | Zeros, devices: tuple[Any, ...]) -> _Program:
    by_device = _by_device(devices)

    def stacked(shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(devices) * shape[0], *shape[1:]), dtype, sharding=by_device)

    def on_device(*arrays: jax.Array) -> jax.Array:
        shards, inputs = arrays[: len(donated)], arrays[len(donated) :]
        return recipe.make(*shards, *[array.reshape(array.shape[1:]) for array in inputs])

    with own_settings(), jax.enable_x64(True):  # what a program takes and makes has its dtype anyway
        donated = [] if recipe.writes_to is None else [stacked(recipe.shape, recipe.writes_to)]
        inputs = [stacked((1, *shape), dtype) for shape, dtype in recipe.arguments]
        program = jax.jit(
            jax.shard_map(
                on_device,
                mesh=by_device.mesh,
                in_specs=by_device.spec,
                out_specs=by_device.spec,
                check_vma=False,
            ),
            donate_argnums=range(len(donated)),
        )
        return program.lower(*donated, *inputs).compile()
