"""Failures and interrupts of restores onto accelerators, restores side by side, and many: none leaves anything."""

import errno
import gc
import itertools
import json
import math
import os
import random
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.devices import assembly, staging
from orbax_safetensors.mapping import Family, tensor
from orbax_safetensors.restore import batches, pipeline
from orbax_safetensors.storage import local, memory
from orbax_safetensors.transfer import threads
from tests.support import tiers
from tests.support.accelerator import accelerator
from tests.support.files import nothing_left, write
from tests.support.moments import interrupted, recorded
from tests.support.quantized_formats import words
from tests.support.saves import assert_same_bits
from tests.support.tiers import cross

SPECS = {"a": P("x"), "b": P("y"), "c": P(None, "y"), "long": P(None, "x")}
SHAPES = dict.fromkeys(SPECS, (16, 48)) | {"long": (64, 96)}
STORED = {name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for name, shape in SHAPES.items()}
TURNED = ("b", "long")
EXPECTED = {name: array.T if name in TURNED else array for name, array in STORED.items()}
OutOfMemory = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def leaves(config):
    views = {name: tensor(name, shape) for name, shape in SHAPES.items()}
    return {name: view.transpose((1, 0)) if name in TURNED else view for name, view in views.items()}


class Work(NamedTuple):
    """A restore of leaves as stored, transposed by programs, and in parts."""

    directory: Path
    target: dict[str, jax.ShapeDtypeStruct]
    arenas: list[weakref.ref]  # of the memory that devices fetch from

    def load(self, **changes: Any) -> Any:
        options = {"in_flight_bytes": 2**13, "threads": 2} | changes
        family = Family("turned", (), leaves)
        return ost.load(self.directory, self.target, family=family, options=ost.SafetensorsOptions(**options))

    def check(self, restored):
        for name, array in EXPECTED.items():
            assert_same_bits(restored[name], array)

    @contextmanager
    def leaving_nothing(self):
        """Fail if a restore of the block leaves a thread, a file, memory, or a region of an accelerator that it has.

        The block gets the accelerator, and must not keep an exception.
        """
        self.arenas.clear()
        before = self.settings()
        with nothing_left(self.directory), accelerator(pinned=True) as device:
            yield device
            assert not device.regions
            device.block_until_ready()  # JAX holds memory until then
        jax.device_put(np.zeros(1)).block_until_ready()  # only a call lets JAX free what it holds no longer
        assert not [arena for arena in self.arenas if arena() is not None]
        assert self.settings() == before

    @staticmethod
    def settings():
        names = ("jax_enable_x64", "jax_debug_nans", "jax_transfer_guard_host_to_device")
        mesh = str(jax.sharding.get_mesh())
        return gc.isenabled(), gc.get_freeze_count() > 1000, mesh, *[getattr(jax.config, name) for name in names]


@pytest.fixture
def work(tmp_path, mesh, monkeypatch):
    """No garbage is collected meanwhile: what goes has no cycles."""
    write(tmp_path / "model.safetensors", STORED)
    target = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, SPECS[name]))
        for name, array in EXPECTED.items()
    }
    work = Work(tmp_path, target, [])
    arena_of = memory.arena_of

    def kept(nbytes):
        arena = arena_of(nbytes)
        work.arenas.append(weakref.ref(arena))
        return arena

    for module in (memory, staging):
        monkeypatch.setattr(module, "arena_of", kept)
    monkeypatch.setattr(batches, "_LEAST_CUT_BYTES", 0)
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    yield work
    gc.set_threshold(*thresholds)


def at_call(number, function, error):
    """`function`, whose `number`-th call raises."""
    calls = itertools.count(1)

    def call(*args, **kwargs):
        if next(calls) == number:
            raise type(error)(*error.args)
        return function(*args, **kwargs)

    return call


def failing_programs(number, compile_, error):
    """`_compiled` for programs of which the `number`-th call fails."""
    run = at_call(number, lambda program, *args: program(*args), error)

    def compiled(*key):
        program = compile_(*key)
        return lambda *args: run(program, *args)

    return compiled


# What fails: where, with which error, and how it is made to. Each call of the function fails in turn.
FAULTS = {
    "sending": (assembly, "side_by_side", jax.errors.JaxRuntimeError("INTERNAL: the link is down"), at_call),
    "assembling": (pipeline, "assemble", OutOfMemory, at_call),
    "compiling": (assembly, "_compiled", jax.errors.JaxRuntimeError("INTERNAL: ptxas"), at_call),
    "running": (assembly, "_compiled", OutOfMemory, failing_programs),
    "arriving": (pipeline, "wait", jax.errors.JaxRuntimeError("INTERNAL: a transfer failed"), at_call),
    "reading": (local.os, "preadv", OSError(errno.EIO, "Input/output error"), at_call),
    "allocating": (memory.Pool, "take", MemoryError(), at_call),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_any_call_may_fail(work, monkeypatch, fault):
    owner, name, error, failing = FAULTS[fault]
    expected = ost.StorageError if isinstance(error, OSError) else type(error)
    for number in itertools.count(1, 7 if tiers.only_fast else 1):
        restored = None
        with work.leaving_nothing() as device, monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(number, getattr(owner, name), error))
            message = ""
            try:
                restored = work.load()
            except expected as raised:
                message = str(raised)
            assert restored is not None or (error.strerror if expected is ost.StorageError else str(error)) in message
            assert device.num_regions == (1 if work.arenas else 0)
        if restored is not None:
            break
    assert number > 1
    assert work.arenas
    work.check(restored)


def test_a_cast_of_the_host_that_loses_values(tmp_path, work):
    write(work.directory / "model.safetensors", STORED | {"count": np.array([1, 2**40])})
    with work.leaving_nothing(), pytest.raises(ost.TensorMismatchError, match="'count': .* does not fit int32"):
        ost.load(work.directory, next(iter(work.target.values())).sharding, family="identity")


def test_a_group_index_that_the_config_denies(work, mesh):
    """A device decodes groups in order alone: the host compares the index."""
    rng = np.random.default_rng(0)
    index = np.repeat(np.arange(2, dtype=np.int32), 16)
    stored = {
        "m.qweight": np.ascontiguousarray(words(rng.integers(0, 16, (8, 32)), 4).T),
        "m.qzeros": words(rng.integers(0, 16, (2, 8)), 4),
        "m.scales": np.ones((2, 8), np.float16),
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "checkpoint_format": "gptq_v2"}
    (work.directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    for at in (index, index[::-1]):
        write(work.directory / "model.safetensors", stored | {"m.g_idx": np.ascontiguousarray(at)})
        with work.leaving_nothing() as device:
            context = nullcontext() if at is index else pytest.raises(ost.TensorMismatchError, match="permutes groups")
            with context as caught:
                ost.load(work.directory, NamedSharding(mesh, P()), family="dequantized")
            del caught, context
            assert device.num_regions == 1


def stage_of(moment):
    """What a restore does in a moment: it reads if it does nothing else, for threads do that."""
    if any(name.startswith(("Programs.", "_compile")) for name in moment.stack):
        return "compiling"
    if any(name.endswith(("._hand_over", "._arrive", "Assembly.array")) for name in moment.stack):
        return "sending"
    return "reading" if "fill" in moment.stack else "planning"


@pytest.mark.parametrize("only_some", cross([True, False], [True]))
@pytest.mark.parametrize("stage", ["planning", "compiling", "reading", "sending"])
def test_an_interrupt_at_any_moment(work, stage, only_some):
    with accelerator(pinned=True):
        work.load()
    with accelerator(pinned=True), recorded() as moments:
        work.load()
    of_stage = [moment for moment in moments if stage_of(moment) == stage]
    chosen = random.Random(0).sample(of_stage, min(50, len(of_stage))) if only_some else of_stage
    num_reached = 0
    for moment in chosen:
        raised = False
        with work.leaving_nothing():
            with interrupted(moment) as reached:
                try:
                    work.load()
                except KeyboardInterrupt:
                    raised = True
            assert raised == bool(reached), moment
        num_reached += raised
    assert num_reached > len(chosen) / 2  # threads may come to some moments later than the first time, or never
    with accelerator(pinned=True):
        work.check(work.load())


def test_an_interrupt_of_a_failure(work, monkeypatch):
    """Threads that wait for batches end, though the interrupt comes before they are told to."""
    side_by_side = assembly.side_by_side

    def load():
        monkeypatch.setattr(assembly, "side_by_side", at_call(3, side_by_side, OutOfMemory))
        with suppress(jax.errors.JaxRuntimeError):
            work.load()

    with accelerator(pinned=True), recorded() as moments:
        load()
    chosen = [moment for moment in moments if moment.file == threads.__file__ or moment.stack[1:2] == ("working",)]
    assert any("working.<locals>.fail" in moment.stack for moment in chosen)
    for moment in chosen:
        with work.leaving_nothing():
            with interrupted(moment), suppress(KeyboardInterrupt):
                load()
            gc.collect()  # in Python 3.13, the error and the interrupt are in a cycle with a frame


def test_an_interrupt_while_programs_are_compiled(work, monkeypatch):
    """The restore waits for what the compiler has begun, and compiles nothing else."""
    begun, may_end, compiled = threading.Event(), threading.Event(), []
    compile_ = assembly._compiled
    main = threading.get_ident()

    def slow(*key):
        begun.set()
        may_end.wait()
        compiled.append(key)
        return compile_(*key)

    def interrupt():
        begun.wait()
        signal.pthread_kill(main, signal.SIGINT)
        may_end.set()

    monkeypatch.setattr(assembly.os, "cpu_count", lambda: 1)
    with work.leaving_nothing(), monkeypatch.context() as patch:
        patch.setattr(assembly, "_compiled", slow)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            work.load()
        thread.join()
    with accelerator(pinned=True):
        work.check(work.load())


def together(*calls):
    """Call each in a thread of its own, all at once, and return what they have returned, or an error as text."""
    start = threading.Barrier(len(calls))

    def call(function):
        start.wait()
        try:
            return function()
        except ost.SafetensorsError as error:  # which the pool would keep, and with it all that its traceback holds
            return str(error)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


def test_two_restores_at_once_of_which_one_fails(work, monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write(other / "model.safetensors", STORED)
    preadv = os.preadv

    def broken(descriptor, buffers, offset, *flags):
        if offset > 2000 and os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(other)):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(local.os, "preadv", broken)
    for _ in range(5):
        with work.leaving_nothing() as device:
            error, restored = together(work._replace(directory=other).load, work.load)
            assert error.startswith(f"{other}/model.safetensors: reading ")
            assert device.num_regions == 2
        work.check(restored)
        del restored


def test_two_restores_at_once_on_different_meshes(work):
    devices = np.array(jax.devices())
    for one, other in [(devices[:4], devices[4:]), (devices[:4], devices[:4][::-1]), (devices, devices[2:4])]:
        works = [
            work._replace(
                target={
                    name: jax.ShapeDtypeStruct(
                        leaf.shape, leaf.dtype, sharding=NamedSharding(Mesh(each, "z"), P(*[None, "z"][: leaf.ndim]))
                    )
                    for name, leaf in work.target.items()
                }
            )
            for each in (one, other)
        ]
        with work.leaving_nothing():
            restored = together(*[each.load for each in works])
        for each, tree in zip(works, restored, strict=True):
            each.check(tree)
            assert all(tree[name].sharding == leaf.sharding for name, leaf in each.target.items())
        del restored, tree


def test_a_restore_while_another_thread_saves(work, tmp_path, mesh):
    tree = {name: jax.device_put(array, NamedSharding(mesh, P("x"))) for name, array in STORED.items()}
    for number in range(3):
        with work.leaving_nothing():
            restored, saved = together(work.load, lambda at=number: ost.save(tmp_path / f"saved{at}", tree))
        assert saved is None
        work.check(restored)
        del restored
        for name, array in ost.load(tmp_path / f"saved{number}").items():
            assert_same_bits(array, STORED[name])


def counts():
    """Threads, mappings, open files and arrays of this process, and programs that are kept."""
    with open("/proc/self/maps") as maps:
        mappings = len(maps.readlines())
    programs = assembly._compiled.cache_info().currsize
    return threading.active_count(), mappings, len(os.listdir("/proc/self/fd")), len(jax.live_arrays()), programs


@pytest.mark.parametrize("number", cross([50, 100], [50]))
def test_many_restores_grow_nothing(work, monkeypatch, number):
    gc.set_threshold(700, 10, 10)
    work.load()
    before = None
    for at in range(number):
        with accelerator(pinned=True):
            work.load()
        if at == 10:
            gc.collect()
            before = counts()
    gc.collect()
    running, mappings, files, live, programs = counts()
    assert (running, files, live, programs) == (before[0], *before[2:])
    assert mappings <= before[1] + 10
    assert assembly._compiled.cache_info().maxsize is not None
