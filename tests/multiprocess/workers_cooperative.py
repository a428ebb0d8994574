"""What `test_cooperative.py` runs in several processes: restores in which each reads a part and devices exchange.

First cases of the matrix, measured; then scenarios, as in `workers_restore`.
"""

from __future__ import annotations

import contextlib
import shutil
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Orbax's barriers are those of jax.distributed.
from orbax.checkpoint._src.multihost import multihost

import orbax_safetensors as ost
from orbax_safetensors.devices import agreement
from orbax_safetensors.restore import cooperative
from orbax_safetensors.restore import run as restoring
from orbax_safetensors.storage import local
from tests.support import cases
from tests.support.checkpoints import Reference
from tests.support.files import DTYPES, random_bits, write
from tests.support.measure import different_shards, measured
from tests.support.roots import TESTDATA

# Processes that wait for one that does not come fail the scenario and not the launch.
OPTIONS = ost.SafetensorsOptions(cooperative=True, join_timeout_secs=60)
SCENARIOS: dict[str, Callable[[Site], Any]] = {}

_QWEN3 = TESTDATA / "qwen3"


def matrix() -> list[cases.Case]:
    """The cases that tell ways to exchange apart: one dtype in all layouts."""
    ones = ("bf16.point", "bf16.line", "bf16.deep")
    return [
        case for case in cases.matrix() if case.mesh != "1d" and len(case.specs) == 1 and next(iter(case.specs)) in ones
    ]


def run(roots: list[str]) -> dict[str, Any]:
    """What was found in the matrix of the first directory, and in scenarios on the second, both by name."""
    reference = Reference(Path(roots[0]))
    found = {case.id: _run(roots[0], case, reference) for case in matrix()}
    site = Site(Path(roots[1]))
    out: dict[str, dict[str, Any]] = {}
    for name, function in SCENARIOS.items():
        try:
            out[name] = {"value": function(site), "failure": None}
        except Exception:
            out[name] = {"value": None, "failure": traceback.format_exc()}
        multihost_utils.sync_global_devices(name)
    return {"matrix": found, "scenarios": out}


def _run(directory: str, case: cases.Case, reference: Reference) -> dict[str, Any]:
    target = _target(case, abstract=False)
    plan = ost.plan_restore(directory, target, options=OPTIONS)
    direct = ost.plan_restore(directory, target)
    abstract = ost.plan_restore(
        directory, _target(case, abstract=True), process_count=jax.process_count(), options=OPTIONS
    )
    restored, cost = measured(lambda: restore(directory, target))
    return {
        "planned": _read_bytes(plan),
        "planned_abstract": _read_bytes(abstract),
        "planned_direct": _read_bytes(direct),
        "bytes_read": cost["bytes_read"],
        "wrong": [
            f"{name} {shard}"
            for name, array in restored.items()
            for shard in different_shards(array, reference.tensors[name])
        ]
        + [name for name, array in restored.items() if array.sharding != target[name].sharding],
    }


def _target(case: cases.Case, *, abstract: bool) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = cases.MESHES[case.mesh]
    devices = mesh.abstract() if abstract else mesh.mesh()
    tensors = cases.tensors()
    return {
        name: jax.ShapeDtypeStruct(*tensors[name], sharding=NamedSharding(devices, spec))
        for name, spec in case.specs.items()
    }


def restore(
    directory: str | Path, item: Any = None, args: Any = None, options: ost.SafetensorsOptions = OPTIONS, **family: Any
) -> Any:
    request = ost.SafetensorsRestore(item=item, restore_args=args, partial_restore=True)
    return ost.SafetensorsHandler(options=options, **family).restore(directory, request)


def _read_bytes(plan: ost.RestorePlan) -> list[int]:
    return [process.read_bytes for process in plan.processes]


class Site:
    """Where a scenario runs: a checkpoint of one tensor for each dtype, and this process's place."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = jax.process_index()
        self.count = jax.process_count()
        self.mesh = Mesh(np.array(jax.devices()).reshape(self.count, -1), ("x", "y"))
        self.expected = tensors()

    def target(self, *spec: Any, names: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return {
            name: jax.ShapeDtypeStruct(self.expected[name].shape, self.expected[name].dtype, sharding=sharding)
            for name in names or self.expected
        }

    def check(self, restored: Mapping[str, Any], names: Any = None) -> None:
        assert set(restored) == set(names or self.expected), restored
        for name, array in restored.items():
            assert not (wrong := different_shards(array, self.expected[name])), (name, wrong)


def tensors() -> dict[str, np.ndarray]:
    """Any bits of every dtype that JAX has without x64."""
    rng = np.random.default_rng(11)
    return {
        name: random_bits(rng, (24, 2048), dtype)
        for name, dtype in sorted(DTYPES.items())
        if name not in ("F64", "I64", "U64")
    }


def scenario(function: Callable[[Site], Any]) -> Callable[[Site], Any]:
    SCENARIOS[function.__name__] = function
    return function


def error_of(call: Callable[[], Any]) -> dict[str, str]:
    """Kind and message of what `call` raises."""
    try:
        found = call()
    except ost.SafetensorsError as error:
        return {"kind": type(error).__name__, "text": str(error)}
    raise AssertionError(f"expected an error, found {found!r}")


def sums(cost: Mapping[str, Any]) -> int:
    """What all processes read together."""
    (own,) = cost["bytes_read"]
    return int(multihost_utils.process_allgather(np.int32(own)).sum())


@scenario
def every_dtype_arrives_bit_by_bit(site: Site) -> None:
    """Devices exchange bits, which move alike if they are as wide: other layouts with a dtype of each width."""
    widths = ["BF16", "C64", "F8_E4M3", "I32"]
    for spec, names in (((), list(site.expected)), ((None, ("x", "y")), widths), (("y", "x"), widths)):
        target = site.target(*spec, names=names)
        restored, cost = measured(lambda target=target: restore(site.root, target))
        site.check(restored, names)
        assert sums(cost) == sum(site.expected[name].nbytes for name in names), (spec, cost)


@scenario
def batches_that_fit_in_flight(site: Site) -> None:
    options = ost.SafetensorsOptions(cooperative=True, in_flight_bytes=50_000)
    names = ["C64", "F32", "I32", "U32"]
    client = multihost.get_jax_distributed_client()
    reached: list[str] = []

    def together(key: str, *args: Any, **kwargs: Any) -> Any:
        reached.append(key)
        return agreement.together(key, *args, **kwargs)

    with mock.patch.object(cooperative, "together", together):
        restored = restore(site.root, site.target(None, "x", names=names), options=options)
    site.check(restored, names)
    assert len(reached) > 3, reached
    multihost_utils.sync_global_devices("forgotten")
    assert client.key_value_dir_get(reached[0].rsplit("/", 1)[0]) == []


@scenario
def what_was_agreed_on_is_forgotten(site: Site) -> None:
    """Where there is nothing to exchange, too: what earlier restores have left, of whatever."""
    site.check(restore(site.root, site.target(("x", "y"), names=["U8"])), ["U8"])
    multihost_utils.sync_global_devices("all have forgotten")
    assert multihost.get_jax_distributed_client().key_value_dir_get("orbax_safetensors/restore") == []


@scenario
def leaves_that_are_alike_are_compiled_once(site: Site) -> None:
    compiled: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    # Of the same shape and dtype, and of a sharding that nobody had before.
    mesh = Mesh(site.mesh.devices, ("rows", "columns"))
    item = {
        name: jax.ShapeDtypeStruct((24, 2048), np.uint8, sharding=NamedSharding(mesh, PartitionSpec(None, "columns")))
        for name in ("U8", "copy.0", "copy.1")
    }
    names = {"U8": "U8", "copy.0": "U8", "copy.1": "U8"}
    cooperative._program.cache_clear()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        restored = restore(site.root / "copies", item)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    for name, array in restored.items():
        assert not different_shards(array, site.expected[names[name]]), name
    assert len(compiled) == 1, compiled


@scenario
def progress_counts_the_arrays_and_not_the_parts(site: Site) -> None:
    told: list[tuple[int, int]] = []
    item = {
        "U8": jax.ShapeDtypeStruct((24, 2048), np.uint8, sharding=NamedSharding(site.mesh, PartitionSpec())),
        "copy.0": jax.ShapeDtypeStruct((24, 2048), np.uint8, sharding=NamedSharding(site.mesh, PartitionSpec("x"))),
    }
    options = replace(OPTIONS, progress=lambda *now: told.append(now))
    restored = restore(site.root / "copies", item, options=options)
    nbytes = sum(
        box.nbytes
        for array in restored.values()
        for box in {str(shard.index): shard.data for shard in array.addressable_shards}.values()
    )
    assert told[0] == (0, nbytes), told
    assert told[-1] == (nbytes, nbytes), told


@scenario
def a_callback_that_fails_in_one_process(site: Site) -> None:
    fail = mock.Mock(side_effect=KeyError("enough"))
    item = {"U8": jax.ShapeDtypeStruct((24, 2048), np.uint8, sharding=NamedSharding(site.mesh, PartitionSpec()))}
    failing = site.index == site.count - 1
    with pytest.raises(KeyError if failing else ost.StorageError, match="enough"):
        restore(site.root / "copies", item, options=replace(OPTIONS, progress=fail if failing else None))


@scenario
def casts_and_shapes_that_differ(site: Site) -> None:
    sharding = NamedSharding(site.mesh, PartitionSpec(None, ("x", "y")))
    for rows in (32, 16):
        args = {"F32": ocp.ArrayRestoreArgs(sharding=sharding, global_shape=(rows, 2048), strict=False)}
        expected = np.zeros((rows, 2048), np.float32)
        expected[:24] = site.expected["F32"][:rows]
        assert not different_shards(restore(site.root, args=args)["F32"], expected), rows
    args = {"U8": ocp.ArrayRestoreArgs(sharding=sharding, dtype=np.float32)}
    restored, cost = measured(lambda: restore(site.root, args=args))
    assert not different_shards(restored["U8"], site.expected["U8"].astype(np.float32))
    assert sums(cost) == site.expected["U8"].nbytes, cost


@scenario
def a_family_with_stacks_and_transposes(site: Site) -> None:
    family = {"family": "maxtext", "variant": {"scan_layers": True}}
    leaves = ost.open_checkpoint(_QWEN3, **family)
    for spec in ((None, "y"), ("y",)):

        def described(_: str, view: Any, spec: Any = spec) -> jax.ShapeDtypeStruct:
            fits = len(view.shape) >= len(spec) and all(
                axis is None or size % site.mesh.shape[axis] == 0 for size, axis in zip(view.shape, spec, strict=False)
            )
            sharding = NamedSharding(site.mesh, PartitionSpec(*(spec if fits else ())))
            return jax.ShapeDtypeStruct(view.shape, view.dtype, sharding=sharding)

        item = leaves.tree(described)
        plan = ost.plan_restore(_QWEN3, item, options=OPTIONS, **family)
        direct = ost.plan_restore(_QWEN3, item, **family)
        assert sum(_read_bytes(plan)) < sum(_read_bytes(direct)), spec
        found, cost = measured(lambda item=item: restore(_QWEN3, item, **family))
        assert cost["bytes_read"] == [plan.processes[site.index].read_bytes], (spec, cost)
        alone = restore(_QWEN3, item, options=ost.SafetensorsOptions(), **family)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
            assert a.sharding == b.sharding
            for one, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
                assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes(), spec


@scenario
def beside_leaves_that_are_not_exchanged(site: Site) -> None:
    """NumPy arrays, replicas that receive, and meshes of one process's devices."""
    rows = Mesh(site.mesh.devices[-1], ("d",))
    replicated = NamedSharding(site.mesh, PartitionSpec())
    args = {
        "F32": ocp.ArrayRestoreArgs(sharding=replicated),
        "U8": ocp.RestoreArgs(restore_type=np.ndarray),
        "BF16": ocp.ArrayRestoreArgs(sharding=NamedSharding(rows, PartitionSpec(None, "d"))),
        "I32": ocp.type_handlers.SingleReplicaArrayRestoreArgs(sharding=replicated),
    }
    restored, cost = measured(lambda: restore(site.root, args=args))
    assert restored["U8"].tobytes() == site.expected["U8"].tobytes()
    site.check({name: restored[name] for name in ("F32", "BF16", "I32")}, ("F32", "BF16", "I32"))
    once = sum(site.expected[name].nbytes for name in ("F32", "BF16", "I32"))
    assert sums(cost) == once + site.count * site.expected["U8"].nbytes, cost


@scenario
def while_the_caller_has_set_a_mesh(site: Site) -> None:
    """Of other devices, or of the same ones in other axes."""
    for mesh in (site.mesh, Mesh(site.mesh.devices[site.index], ("d",))):
        received = NamedSharding(site.mesh, PartitionSpec())
        target = site.target("x", names=["BF16"]) | site.target(None, "y", names=["F32"])
        args = {"I32": ocp.type_handlers.SingleReplicaArrayRestoreArgs(sharding=received)}
        with jax.set_mesh(mesh):
            site.check(restore(site.root, target), target)
            site.check(restore(site.root, args=args), args)
            assert jax.sharding.get_mesh() == mesh


@scenario
def cpu_devices_share_the_memory_of_equal_shards(site: Site) -> None:
    restored = restore(site.root, site.target(names=["F32"]))["F32"]
    assert len({shard.data.unsafe_buffer_pointer() for shard in restored.addressable_shards}) == 1


# Errors: all processes have one, and go on.


@scenario
def a_read_that_fails_in_one_process(site: Site) -> str:
    last = site.count - 1
    filled = cooperative.exchanged

    def failing(error: type[Exception]) -> Callable[..., Any]:
        """Reads of tensors that fail, after headers have been read."""

        def exchanged(*args: Any) -> Any:
            broken = mock.Mock(side_effect=error("no more bytes")) if site.index == last else local.LocalFile.read
            with mock.patch.object(local.LocalFile, "read", broken):
                return filled(*args)

        return exchanged

    for error in (ost.SafetensorsError, OSError):
        with mock.patch.object(cooperative, "exchanged", failing(error)):
            found = error_of(lambda: restore(site.root, site.target(None, "x")))
        assert "no more bytes" in found["text"], found
        if site.index != last:
            assert found["kind"] == "StorageError", found
            assert f"process {last} failed" in found["text"], found
    site.check(restore(site.root, site.target(None, "x")))
    return "done"


@scenario
def a_replica_that_cannot_read(site: Site) -> str:
    """Or whose process cannot open the checkpoint: the others have the error of that process."""
    args = {
        "I32": ocp.type_handlers.SingleReplicaArrayRestoreArgs(sharding=NamedSharding(site.mesh, PartitionSpec("y")))
    }
    request = ost.SafetensorsRestore(restore_args=args, partial_restore=True)
    for where in ((local.LocalFile, "read"), (restoring, "read_checkpoint")):
        broken = mock.patch.object(*where, side_effect=OSError("no more bytes"))
        with broken if site.index == 0 else contextlib.nullcontext():
            found = error_of(lambda: ost.SafetensorsHandler().restore(site.root, request))
        assert found["kind"] == "StorageError", found
        assert "no more bytes" in found["text"], found
        if site.index:
            assert "process 0 failed" in found["text"], found
    site.check(ost.SafetensorsHandler().restore(site.root, request), args)
    return "done"


@scenario
def a_checkpoint_that_one_process_cannot_open(site: Site) -> str:
    """Or map, or find in it what it is asked for: nobody waits for it, and the next restore finds all in step."""
    last = site.count - 1
    target = site.target(None, "x")

    for where, error in (
        ((restoring, "read_checkpoint"), ost.StorageError),
        ((restoring, "read_checkpoint"), MemoryError),
        ((restoring, "mapped"), ost.MappingError),
        ((restoring, "match"), ost.TensorMismatchError),
        ((cooperative, "parts_of"), ost.TensorMismatchError),
    ):
        broken = mock.patch.object(*where, side_effect=error("no such thing"))
        with broken if site.index == last else contextlib.nullcontext():
            found = error_of(lambda: restore(site.root, target))
        assert "no such thing" in found["text"], found
        if site.index != last:
            assert found["kind"] == "StorageError", found
            assert f"process {last} failed" in found["text"], found
    record = mock.Mock(side_effect=[ost.ChecksumError("no such sums")] if site.index == last else [None])
    with mock.patch.object(restoring, "Comparison", record):
        found = error_of(lambda: restore(site.root, target, options=replace(OPTIONS, checksums=True)))
    assert "no such sums" in found["text"], found
    site.check(restore(site.root, target))
    return "done"


@scenario
def a_process_that_would_exchange_nothing(site: Site) -> str:
    """It does not go on alone."""
    target = site.target(None, "x", names=["U8"])
    nothing = mock.patch.object(cooperative, "parts_of", return_value=None)
    with nothing if site.index == 0 else contextlib.nullcontext():
        found = error_of(lambda: restore(site.root, target))
    assert found["kind"] == "TensorMismatchError", found
    assert "does not restore the same as process 0" in found["text"], found
    return "done"


@scenario
def nobody_waits_who_does_not_have_to(site: Site) -> None:
    """As nobody asked for it, or for arrays of its own, which one process restores when it likes."""
    met: list[str] = []

    def exchange(key: str, *args: Any) -> list[str]:
        met.append(key)
        return real(key, *args)

    real = agreement.all_gather
    own = Mesh(np.array(jax.local_devices()), ("d",))
    alone = {"F32": jax.ShapeDtypeStruct((24, 2048), np.float32, sharding=NamedSharding(own, PartitionSpec()))}
    with mock.patch.object(agreement, "all_gather", exchange):
        site.check(restore(site.root, site.target(None, "x"), options=ost.SafetensorsOptions()))
        for _ in range(site.index):
            site.check(restore(site.root, alone), ["F32"])
        assert met == [], met
        site.check(restore(site.root, site.target(None, "x")))
    assert met


@scenario
def processes_that_do_not_restore_the_same(site: Site) -> str:
    spec = (None, "x") if site.index == 0 else (None, "y")
    found = error_of(lambda: restore(site.root, site.target(*spec)))
    assert found["kind"] == "TensorMismatchError", found
    assert "does not restore the same" in found["text"], found
    site.check(restore(site.root, site.target(None, "x")))
    return found["text"]


# Local copies: hosts that do not have the same checkpoint.


def _copies(site: Site, name: str, *, recorded: bool) -> Path:
    """A directory of this process alone. In that of the last process, all values differ, and no header does."""
    sources = []
    for number in range(2):
        sources.append(source := site.root / f"{name} {number}")
        values = {"U8": site.expected["U8"] + np.uint8(number)}
        if recorded:
            ost.save(source, values)
        elif site.index == 0:
            source.mkdir()
            write(source / "model.safetensors", values)
    multihost_utils.sync_global_devices(f"{name} written")
    own = site.root / f"{name} of {site.index}"
    shutil.copytree(sources[site.index == site.count - 1], own / "model")
    return own


@scenario
def a_local_copy_with_other_values(site: Site) -> str:
    """At the same path on each host, of the same sizes and headers."""
    for recorded, differing in ((True, "recorded checksums"), (False, "sampled bytes")):
        own = _copies(site, differing, recorded=recorded)
        with contextlib.chdir(own):
            found = error_of(lambda: restore("model", site.target(None, "x", names=["U8"])))
        assert found["kind"] == "TensorMismatchError", found
        assert f"process {site.count - 1} does not see" in found["text"], found
        assert differing in found["text"], found
    return found["text"]


@scenario
def local_copies_at_other_paths(site: Site) -> None:
    """What agrees is the content. If it does not, the error has the paths."""
    for recorded in (True, False):
        own = site.root / f"elsewhere {recorded} of {site.index}"
        if recorded:
            ost.save(site.root / "elsewhere", {"U8": site.expected["U8"]})
            shutil.copytree(site.root / "elsewhere", own)
        else:
            own.mkdir()
            write(own / "model.safetensors", {"U8": site.expected["U8"]})
        site.check(restore(own, site.target(None, "x", names=["U8"])), ["U8"])
    own = _copies(site, "here and there", recorded=False)
    found = error_of(lambda: restore(own / "model", site.target(None, "x", names=["U8"])))
    assert found["kind"] == "TensorMismatchError", found
    for process in (0, site.count - 1):
        assert repr(str(site.root / f"here and there of {process}" / "model")) in found["text"], found
