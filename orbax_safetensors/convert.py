"""From files to files: `convert` between safetensors and Orbax, `reshard` within either, whatever the model's size."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from orbax_safetensors.checkpoint import SUFFIX, read_checkpoint
from orbax_safetensors.errors import MappingError, SafetensorsError, StorageError, TensorMismatchError
from orbax_safetensors.format.dtypes import DType, from_numpy
from orbax_safetensors.format.layout import MAX_FILE_BYTES, lay_out
from orbax_safetensors.format.sharding_info import without_sharding_info
from orbax_safetensors.io.stores import store_of
from orbax_safetensors.mapped import AskedFamily, mapped, read_config, taken_apart
from orbax_safetensors.mapping import registry
from orbax_safetensors.mapping.family import Family
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.orbax_store import (
    OrbaxCheckpoint,
    OrbaxItem,
    OrbaxLeaf,
    array_name,
    named_sharding,
    open_orbax,
    open_step,
)
from orbax_safetensors.orbax_store.leaves import ARRAYS, STRING
from orbax_safetensors.orbax_store.places import is_remote
from orbax_safetensors.plan.view import View
from orbax_safetensors.processes import forget, new_key, together
from orbax_safetensors.sources import Source
from orbax_safetensors.streaming import layouts
from orbax_safetensors.streaming.beside import Beside, beside, copied
from orbax_safetensors.streaming.casts import Casts
from orbax_safetensors.streaming.cutting import interleaved
from orbax_safetensors.streaming.orbax_tiles import OrbaxSource
from orbax_safetensors.streaming.partition import AskedMesh, Partition, Spec, check_found, partition
from orbax_safetensors.streaming.pipeline import Moved, Progress, TileSource, batch_bytes, check_fits, is_below
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from orbax_safetensors.streaming.to_objects import write_objects
from orbax_safetensors.streaming.to_orbax import OrbaxTarget, write_orbax
from orbax_safetensors.streaming.to_safetensors import write_safetensors

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]

MEMORY_BYTES = 2 * 2**30
_LEAST_MEMORY_BYTES = 4  # of which a quarter can hold something
# What Orbax restores in one piece even where it wants a part, where nobody says how arrays will be sharded.
_CHUNK_BYTES = 64 * 2**20
_MAXTEXT = "maxtext."
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Conversion:
    """What a conversion did in this process.

    Attributes:
      path: what was made: a directory of safetensors files, or of a step or an item of Orbax.
      nbytes: bytes of arrays that were moved; less than all where others helped, or a conversion was resumed.
      seconds: how long it took.
      peak_bytes: the most memory that the process had since it began.
      requests: reads and writes of the storage.
    """

    path: str
    nbytes: int
    seconds: float
    peak_bytes: int
    requests: int

    def to_json(self) -> dict[str, Any]:
        """The same as a dict."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def convert(
    source: PathLike,
    destination: PathLike,
    *,
    to: str,
    family: AskedFamily = None,
    variant: Mapping[str, Any] | None = None,
    config: Any = None,
    dtype: Any = None,
    mesh: AskedMesh = None,
    spec: Mapping[str, Spec] | None = None,
    like: Any = None,
    step: int = 0,
    compression: bool = True,
    memory_bytes: int = MEMORY_BYTES,
    resume: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Converts a checkpoint of safetensors files to one of Orbax, or back, in tiles.

    Nothing but tiles is held, in `memory_bytes`. Every process of a program calls this alike and moves its part. Until
    all is there, nothing is that opens: what is unfinished has the name that Orbax gives it, or is in
    `<destination>.partial`; it stays after a failure, for a call with `resume`.

    Args:
      source: files, or a directory, as for `open_checkpoint`; or what `open_orbax` opens. Either may be a URL.
      destination: a directory: of steps for Orbax, also as a `gs://` URL, of which `<destination>/<step>/items` is
        made; or of safetensors files, which must not be there yet.
      to: `"orbax"` or `"safetensors"`.
      family, variant: as for `SafetensorsRestore`. MaxText's families make MaxText's tree with its metadata, and take
        what it has said of `scan_layers` from Orbax's. Without a family, arrays are tensors of the same names.
      config: to safetensors, the content of the `config.json` to write, something with a `to_dict` that gives it, its
        path, or a directory with one, of which the tokenizer's files and their like are copied too.
      dtype: to cast floating-point arrays to: one for all of them, which the config then says, too; or dtypes by
        pattern, the first of which is used that is found (`re.search`) in the name that the destination has for an
        array. What no pattern is found in keeps its dtype, as all do without it.
      mesh, spec: to Orbax, the sizes of the axes of a mesh by name, and by pattern of a name the axes for each of an
        array's dimensions, as for `reshard`. Arrays are stored in chunks of what each device will have.
      like: to Orbax, instead of both, the target of a restore, as for `reshard`.
      step: to Orbax, its number.
      compression: to Orbax, whether chunks are compressed.
      memory_bytes: for tiles on their way, and all that is made of them.
      resume: go on with what a call with the same arguments has left unfinished.
      progress: called now and then with the bytes that this process has moved, and those that it will.

    Raises:
      StorageError: the destination is there already, or something cannot be read or written or changed meanwhile.
      TensorMismatchError: mesh, spec or dtype does not fit the arrays, or what is to be resumed is something else.
      MappingError: there is no such family, or it does not fit the checkpoint.
      HeaderError, IndexFileError: the source is not valid.
    """
    how = _Run(source, destination, memory_bytes, resume, progress)

    def plan() -> Plan:
        if to == "orbax":
            _not_for("to='orbax'", config=config)
            sharding = partition(mesh, spec, like)
            return _safetensors_to_orbax(how, family, variant, Casts(dtype), sharding, step, compression)
        if to == "safetensors":
            _not_for("to='safetensors'", mesh=mesh, spec=spec, like=like, step=step, compression=not compression)
            return _orbax_to_safetensors(how, family, variant, config, Casts(dtype))
        raise SafetensorsError(f"to is {to!r}, must be 'orbax' or 'safetensors'")

    return how.run(plan, to, family if isinstance(family, str) else None, variant, dtype, mesh, spec, step, compression)


def reshard(
    source: PathLike,
    destination: PathLike,
    *,
    mesh: AskedMesh = None,
    spec: Mapping[str, Spec] | None = None,
    like: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    compression: bool = True,
    memory_bytes: int = MEMORY_BYTES,
    resume: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Stores a checkpoint anew in the format that it has, as suits another mesh, in tiles; see `convert`.

    Of Orbax, all items of a step are stored anew: trees in other chunks, those of the shards that devices will have,
    or smaller ones of which these are made; what is no tree is copied. Names, metadata and handlers are kept, and
    without a mesh the shardings that are recorded. Safetensors files get one file for each
    device of the mesh, as PyTorch's distributed checkpoints have one for each rank, in which each shard is one range;
    without a mesh, they are laid out anew in files of at most `max_file_bytes`. What lies beside them is copied.

    Args:
      source: the directory of a step of Orbax, of steps, whose latest is taken, or of one item; or safetensors files.
      destination: as for `convert`. A step of Orbax keeps the name of its directory, below it; of what is no step, an
        item on its own, it takes the place.
      mesh: sizes of axes by name, as `{"fsdp": 16}`, or a mesh of JAX. No device is needed.
      spec: by pattern (`re.search`) of a name, that which an array has in its item, for each leading dimension of the
        array the axis that shards it, several in a tuple, or None. The first pattern counts that is found in a name,
        and arrays that none is found in are not sharded. Axes must divide the dimensions, as JAX wants it. A
        `PartitionSpec` says it as well.
      like: instead of both, the target of a restore: a tree with the names of the checkpoint, of anything that has a
        `sharding` over a mesh, as `jax.ShapeDtypeStruct` and `ArrayRestoreArgs`. What has none is not sharded.
      max_file_bytes: as for `SafetensorsSave`.
      compression, memory_bytes, resume, progress: as for `convert`.

    Raises: as `convert`.
    """
    how = _Run(source, destination, memory_bytes, resume, progress)

    def sharding() -> Partition | None:
        return None if mesh is None and not spec and like is None else partition(mesh, spec, like)

    def plan() -> Plan:
        if is_orbax(how.source):
            _not_for("checkpoints of Orbax", max_file_bytes=max_file_bytes != MAX_FILE_BYTES)
            return _reshard_orbax(how, sharding(), compression)
        _not_for("safetensors", compression=not compression)
        meshed = mesh or like is not None
        _not_for("a mesh, whose devices have a file each", max_file_bytes=meshed and max_file_bytes != MAX_FILE_BYTES)
        return _reshard_safetensors(how, sharding(), max_file_bytes)

    return how.run(plan, mesh, spec, max_file_bytes, compression)


def _not_for(what: str, **given: Any) -> None:
    for argument, value in given.items():
        if value:
            raise SafetensorsError(f"{argument} is not for {what}")


def place(path: PathLike) -> str:
    """An absolute path, or a URL as it is but for a slash at its end."""
    path = os.fspath(path)
    return path.rstrip("/") if "://" in path else os.path.abspath(path)


Plan = tuple[TileSource, Callable[[], Moved]]  # an open source, and what moves it


class _Run:
    """What every conversion has, and how it is run: planned in all processes or in none, then timed."""

    def __init__(
        self, source: PathLike, destination: PathLike, memory_bytes: int, resume: bool, progress: Progress | None
    ) -> None:
        self._asked = {"source": source, "destination": destination}
        self.source, self.destination = (
            place(os.fsdecode(path)) if isinstance(path, str | os.PathLike) else "" for path in self._asked.values()
        )
        self.memory_bytes = memory_bytes
        self.options: Any = {"memory_bytes": memory_bytes, "resume": resume, "progress": progress}

    def _check(self) -> None:
        for argument, path in self._asked.items():
            if not isinstance(path, str | os.PathLike) or not os.fsdecode(path):
                raise SafetensorsError(f"{argument} is {path!r}, must be a path or a URL")
        if type(self.memory_bytes) is not int or self.memory_bytes < _LEAST_MEMORY_BYTES:
            raise SafetensorsError(
                f"memory_bytes is {self.memory_bytes!r}, must be an integer of at least {_LEAST_MEMORY_BYTES}"
            )

    def of_step(self, name: str) -> str:
        """The directory of a step, where the destination is one of steps."""
        return os.path.join(self.destination, name)

    def check_outside(self, source: str) -> None:
        """Raises `StorageError` where what is made would be in the source."""
        if is_below(self.destination, source):
            raise StorageError(f"{self.destination}: is in the source, {source}")

    def run(self, plan: Callable[[], Plan], *asked: Any) -> Conversion:
        """Does what `plan` comes to; `asked` are the other arguments, which processes have to be called with alike."""
        started = time.perf_counter()
        key = new_key("conversion")
        opened: Plan | None = None

        def checked() -> None:
            nonlocal opened
            self._check()
            opened = plan()

        try:
            facts = (self.source, self.destination, self.memory_bytes, self.options["resume"], *asked)
            otherwise = "was called with other arguments than process 0"
            together(key, checked, repr(facts).replace("\n", " "), otherwise=otherwise)
            assert opened is not None
            moved = opened[1]()
        finally:
            if opened is not None:
                opened[0].close()
        forget(key)
        seconds = time.perf_counter() - started
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        logger.info(
            "Made %s: %d bytes in %.2f s, %.2f GB/s, with at most %d bytes of memory",
            moved.path,
            moved.nbytes,
            seconds,
            moved.nbytes / max(seconds, 1e-9) / 1e9,
            peak_bytes,
        )
        return Conversion(moved.path, moved.nbytes, seconds, peak_bytes, moved.requests)


def _safetensors_to_orbax(
    how: _Run,
    family: AskedFamily,
    variant: Mapping[str, Any] | None,
    casts: Casts,
    sharding: Partition,
    step: int,
    compression: bool,
) -> Plan:
    path = how.source
    if type(step) is not int or step < 0:
        raise SafetensorsError(f"step is {step!r}, must be an integer of at least 0")
    if is_orbax(path):
        raise SafetensorsError(f"{path}: has no {SUFFIX} files; reshard makes another checkpoint of one of Orbax")
    checkpoint = mapped(read_checkpoint(path), family, variant, complete=True, dequantize=True)
    found = registry.find(family, read_config(checkpoint))
    maxtext = _is_maxtext(found)
    views = {f"params.{name}" if maxtext else name: view for name, view in checkpoint.leaves.items()}
    source = SafetensorsSource(
        checkpoint, views, casts.of({name: view.dtype for name, view in views.items()}), SafetensorsOptions()
    )
    check_found("spec", sharding.patterns, views)

    def leaf(name: str, view: View) -> OrbaxLeaf:
        name = f"params.{name}" if maxtext else name
        return _leaf(sharding, name, source.leaves[name].shape, source.leaves[name].dtype)

    tree: Any = checkpoint.tree(leaf)
    scanned = bool((variant or {}).get("scan_layers", True))
    target = OrbaxTarget(
        path=how.of_step(str(step)),
        items={"items": OrbaxItem({"step": 0, "params": tree, "opt_state": {}} if maxtext else tree)},
        metadata={"custom_metadata": {"scan_layers": scanned} if maxtext else None},
        others={},
        compression=compression,
        chunk_bytes=_chunk_bytes(sharding, how.memory_bytes),
    )
    return source, lambda: write_orbax(source, target, interleaved(views), **how.options)


def _reshard_orbax(how: _Run, sharding: Partition | None, compression: bool) -> Plan:
    path = how.source
    step = open_step(path, memory_bytes=how.memory_bytes // 4)
    how.check_outside(step.whole)
    items = {name: item for name, item in step.items.items() if item.leaves}
    if not items:
        raise SafetensorsError(f"{path}: has no leaf")
    stored = {
        array_name(items, name, own): (item, own)
        for name, item in items.items()
        for own, leaf in item.leaves.items()
        if leaf.kind in ARRAYS
    }
    source = OrbaxSource(step, stored, how.memory_bytes)
    cut = sharding or partition(None, None)
    check_found("spec", cut.patterns, (own for _, own in stored.values()))

    def anew(item: OrbaxCheckpoint, name: str, facts: OrbaxLeaf) -> Any:
        if facts.kind not in ARRAYS:
            return item.value(name)
        leaf = _leaf(cut, name, facts.shape, facts.dtype)
        record = leaf.sharding if sharding else facts.sharding
        return replace(leaf, kind=facts.kind, random_key=facts.random_key, sharding=record)

    target = OrbaxTarget(
        path=how.destination if step.step is None else how.of_step(step.step),
        items={
            name: OrbaxItem(item.tree(partial(anew, item)), item.tree_custom_metadata, item.ocdbt, item.zarr3)
            for name, item in items.items()
        },
        metadata=step.metadata,
        others={**step.others, **{name: item.path for name, item in step.items.items() if name not in items}},
        compression=compression,
        chunk_bytes=_chunk_bytes(cut, how.memory_bytes),
    )
    alone = [(name,) for name in source.leaves]
    return source, lambda: write_orbax(source, target, alone, **how.options)


def _orbax_to_safetensors(
    how: _Run,
    family: AskedFamily,
    variant: Mapping[str, Any] | None,
    config: Any,
    casts: Casts,
) -> Plan:
    path = how.source
    if not is_orbax(path):
        raise SafetensorsError(f"{path}: is no checkpoint of Orbax; reshard lays out safetensors files anew")
    checkpoint = open_orbax(path, memory_bytes=how.memory_bytes // 4)
    how.check_outside(checkpoint.whole)
    around = beside(config)
    if isinstance(family, str) and around.config is None:
        raise MappingError(f"{path}: a family needs the config of the model: pass config")
    found = registry.find(family, around.config or {})
    variant = dict(variant or {})
    if _is_maxtext(found) and "scan_layers" in checkpoint.custom_metadata:
        variant.setdefault("scan_layers", checkpoint.custom_metadata["scan_layers"])
    stored = _arrays(checkpoint, maxtext=_is_maxtext(found))
    source = OrbaxSource(checkpoint, {name: (checkpoint, own) for name, own in stored.items()}, how.memory_bytes)
    # Arrays without memory, which say shape and dtype.
    given = [
        Source(name, np.broadcast_to(np.zeros((), fact.dtype), fact.shape), fact.dtype, View.tensor(name, *fact))
        for name, fact in source.leaves.items()
    ]
    viewed, tensors = taken_apart(given, family, variant, around.config or {})
    if store_of(how.destination, None)[0].whole:
        # A chunk is read for every file that it has a part in, so that a file has what is stored together.
        tensors = {name: tensors[name] for one in viewed for name in one.view.tensors} | tensors
    dtypes = casts.of({name: dtype for name, (dtype, _) in tensors.items()})
    layout = lay_out(
        [(name, _stored(path, name, dtypes[name]), shape) for name, (_, shape) in tensors.items()],
        _METADATA,
        max_file_bytes=_file_bytes(how),
        alignment=SafetensorsOptions().alignment,
    )
    if casts.everywhere is not None:
        around = around.stored_as(casts.everywhere)
    files = layouts.whole(layout, {one.name: one.view for one in viewed})
    joined = interleaved(files.views)
    for names in joined:
        for name in names:
            check_fits(name, len(names) * checkpoint.leaves[stored[name]].chunk_nbytes, how.memory_bytes)
    return source, _writing(source, how, files, around, joined)


def _reshard_safetensors(how: _Run, sharding: Partition | None, max_file_bytes: int) -> Plan:
    path = how.source
    checkpoint = read_checkpoint(path)
    options = SafetensorsOptions()
    source = SafetensorsSource(checkpoint, checkpoint.leaves, {}, options)
    stored = {name: (tensor.stored_dtype, tensor.stored_shape) for name, tensor in checkpoint.tensors.items()}
    metadata = _METADATA | without_sharding_info(checkpoint.metadata)
    if sharding is None:
        if type(max_file_bytes) is not int or max_file_bytes < 1:
            raise SafetensorsError(f"max_file_bytes is {max_file_bytes!r}, must be an integer of at least 1")
        layout = lay_out(
            [(name, *facts) for name, facts in stored.items()],
            metadata,
            max_file_bytes=max_file_bytes,
            alignment=options.alignment,
        )
        files = layouts.whole(layout, {name: View.tensor(name, *source.leaves[name]) for name in source.leaves})
    else:
        check_found("spec", sharding.patterns, stored)
        boxes = {name: sharding.boxes(name, shape) for name, (_, shape) in stored.items()}
        for name, (dtype, shape) in stored.items():
            if dtype.bits < 8 and sharding.shard(name, shape) != shape:
                raise TensorMismatchError(f"{name!r}: elements of {dtype.name} share bytes, so it cannot be sharded")
        files = layouts.in_pieces(stored, boxes, metadata, options.alignment)
    of_one_file = checkpoint.files[0].path == checkpoint.path
    around = Beside() if of_one_file else Beside(copies=copied(path))
    alone = [(name,) for name in source.leaves]
    return source, _writing(source, how, files, around, alone)


def _writing(
    source: TileSource, how: _Run, files: layouts.Files, around: Beside, groups: Sequence[tuple[str, ...]]
) -> Callable[[], Moved]:
    """What writes safetensors files; `groups` are leaves that interleave in them."""
    store, destination = store_of(how.destination, None)
    options = SafetensorsOptions()
    if store.whole:
        return lambda: write_objects(source, store, destination, files, around, options, **how.options)
    return lambda: write_safetensors(source, destination, files, around, groups, options, **how.options)


def _stored(path: str, name: str, dtype: np.dtype) -> DType:
    try:
        return from_numpy(dtype)
    except TensorMismatchError as error:
        raise TensorMismatchError(f"{path}: {name!r}: {error}") from None


def _file_bytes(how: _Run) -> int:
    """The most that a file gets of tensors, whose order is not that in which they are made."""
    # On an object store, a file waits in memory until it is whole.
    whole = store_of(how.destination, None)[0].whole
    return min(MAX_FILE_BYTES, batch_bytes(how.memory_bytes)) if whole else MAX_FILE_BYTES


def is_orbax(path: str) -> bool:
    """Whether `path`, or a `gs://` URL, is meant as a checkpoint of Orbax: a directory without safetensors files."""
    if is_remote(path):
        store, path = store_of(path, None)
        names = store.list(path)
    else:
        try:
            names = os.listdir(path) if os.path.isdir(path) else None
        except OSError as error:
            raise StorageError(f"{path}: cannot be listed: {error.strerror}") from error
    return names is not None and not any(name.endswith(SUFFIX) for name in names)


def _leaf(sharding: Partition, name: str, shape: tuple[int, ...], dtype: np.dtype) -> OrbaxLeaf:
    """An array whose chunks are its shards."""
    record = named_sharding(sharding.mesh, sharding.spec(name, shape))
    return OrbaxLeaf(shape, dtype, sharding.shard(name, shape), sharding=record)


def _chunk_bytes(sharding: Partition, memory_bytes: int) -> int:
    """The most that a chunk has where nobody says how arrays will be sharded; else it is what a device will have."""
    return memory_bytes if sharding.patterns else _CHUNK_BYTES


def _is_maxtext(family: Family | None) -> bool:
    return family is not None and family.name.startswith(_MAXTEXT)


def _arrays(checkpoint: OrbaxCheckpoint, *, maxtext: bool) -> dict[str, str]:
    """The leaves to store as tensors, and the names of their arrays.

    Of MaxText, parameters only, which families have below `params`, training states below `params.params`.
    """
    names = [name for name, leaf in checkpoint.leaves.items() if leaf.kind != STRING]
    if not maxtext:
        for what, lost in (
            ("strings are left out", [name for name in checkpoint.leaves if name not in names]),
            ("random keys become their data", [name for name in names if checkpoint.leaves[name].random_key]),
        ):
            if lost:
                logger.warning("%s: safetensors files hold arrays only, so %s: %s", checkpoint.path, what, lost)
        return {name: name for name in names}
    above = "params." if any(name.startswith("params.params.") for name in names) else ""
    return {name.removeprefix(above): name for name in names if name.startswith(f"{above}params.")}
