"""Host memory that devices fetch from: which kind, that it is registered once and let go once, and in which order."""

import ctypes
import gc
import inspect
import itertools
import mmap
import sys
import threading
import weakref
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from orbax_safetensors.devices import staging
from orbax_safetensors.devices.staging import Kind, kind_for, staging_memory
from orbax_safetensors.storage.memory import PAGE_BYTES
from tests.support.tiers import cross

PINNED = "pinned_host"
NBYTES = 3 * 2**20 + 5
THREADS = 2


class Client:
    """A client of GPUs that registers memory; `at` is called before and after each step, and may raise.

    It refuses what overlaps, what is not mapped, and pages that nobody has touched, and fails if memory goes while a
    transfer reads it.
    """

    def __init__(self, at=lambda step: None, refusal=None):
        self.regions, self.reading, self.calls = {}, [], []
        self.devices = [Device(self, number) for number in range(2)]
        self._at, self._refusal, self._lock = at, refusal, threading.Lock()

    def dma_map(self, address, nbytes):
        self._at("before the call registers")
        if self._refusal is not None:
            raise jax.errors.JaxRuntimeError(self._refusal)
        with self._lock:
            assert is_mapped(address, nbytes)
            assert are_resident(address, nbytes)
            for other, size in self.regions.items():
                assert address + nbytes <= other or other + size <= address, "regions overlap"
            self.regions[address] = nbytes
            self.calls.append(("map", address, nbytes))
        self._at("after the call registers")

    def dma_unmap(self, address):
        self._at("before the call lets go")
        with self._lock:
            if address not in self.regions:
                raise jax.errors.JaxRuntimeError("INTERNAL: Failed to unregister host memory")
            nbytes = self.regions.pop(address)
            assert is_mapped(address, nbytes)
            assert not self.reading, "a transfer reads memory that goes"
            self.calls.append(("unmap", address))
        self._at("after the call lets go")

    def put(self, array, device):
        """Take the place of `jax.device_put`: a transfer to a device ends when one that began later does."""
        self._at("before the wait")
        assert device in self.devices
        self.reading.append(device)
        return SimpleNamespace(block_until_ready=lambda: self._settle(device))

    def _settle(self, device):
        self.reading = [other for other in self.reading if other is not device]
        self._at("in the wait")


class Device:
    def __init__(self, client, number=0, platform="gpu", kinds=("device", PINNED)):
        self.client, self.id, self.platform = client, number, platform
        self._memories = [SimpleNamespace(kind=kind) for kind in kinds]

    def addressable_memories(self):
        return self._memories


def ranges():
    """What the process has mapped, as addresses, with neighbours put together."""
    out = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if out and out[-1][1] == first:
                out[-1][1] = last
            else:
                out.append([first, last])
    return out


def is_mapped(address, nbytes):
    return any(first <= address and address + nbytes <= last for first, last in ranges())


def are_resident(address, nbytes):
    pages = -(-nbytes // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), resident) == 0
    return all(page & 1 for page in resident)


@contextmanager
def putting(client):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging.jax, "device_put", client.put)
        yield


def registered(client, nbytes=NBYTES):
    return staging_memory(Kind.REGISTERED, client.devices, nbytes, THREADS)


OLD = SimpleNamespace()


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (Client().devices, Kind.REGISTERED),
        ([Device(OLD, number) for number in range(2)], Kind.PINNED),
        (Client().devices + Client().devices, Kind.PINNED),
        (Client().devices + [Device(OLD)], Kind.PINNED),
        ([Device(OLD, kinds=["device"])], Kind.ORDINARY),
        ([Device(Client(), platform="tpu")], Kind.ORDINARY),
        ([Device(Client(), platform="cpu")], Kind.ORDINARY),
        (Client().devices + [Device(OLD, platform="tpu")], Kind.ORDINARY),
        ([], Kind.ORDINARY),
    ],
    ids=["gpus", "older jaxlib", "two clients", "one older", "no pinned", "tpu", "cpu", "gpus and a tpu", "none"],
)
def test_the_kind_is_what_all_devices_fetch_from(devices, expected):
    assert kind_for(devices) is expected


def test_cpu_devices_have_ordinary_memory():
    assert kind_for(jax.devices()) is Kind.ORDINARY


@pytest.mark.parametrize(
    ("platform", "kinds", "expected"),
    [("gpu", ["device", PINNED], True), ("gpu", ["device"], False), ("tpu", ["device", PINNED], False)],
)
def test_which_devices_fetch_from_pinned_memory(platform, kinds, expected):
    assert staging.fetches_pinned(Device(None, 0, platform, kinds)) is expected


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES, NBYTES, 40 * 2**20])
@pytest.mark.parametrize("kind", Kind)
def test_memory_has_its_size_from_a_page_on_and_goes(kind, nbytes):
    client = Client()
    devices = jax.devices()[2:4] if kind is Kind.PINNED else client.devices
    with staging_memory(kind, devices, nbytes, THREADS) as memory:
        assert memory.dtype == np.uint8
        assert memory.shape == (nbytes,)
        address = memory.ctypes.data
        assert address % PAGE_BYTES == 0
        memory[:] = 7
        assert client.regions == ({address: nbytes} if kind is Kind.REGISTERED else {})
    assert not client.regions
    assert client.calls == [("map", address, nbytes), ("unmap", address)] * (kind is Kind.REGISTERED)
    alive = weakref.ref(memory)
    assert is_mapped(address, nbytes)
    del memory
    assert alive() is None
    assert kind is Kind.PINNED or not is_mapped(address, nbytes)


def test_registered_memory_stays_mapped_as_long_as_something_reads_it():
    """JAX holds a view until its transfer has ended."""
    client = Client()
    with registered(client) as memory:
        view = memory[1000:2000]
    address = memory.ctypes.data
    del memory
    assert is_mapped(address, NBYTES)
    del view
    assert not is_mapped(address, NBYTES)


def test_pinned_memory_is_an_array_of_the_device_and_lives_as_long_as_it_is_used(monkeypatch):
    put, arrays = jax.device_put, []

    def device_put(array, sharding):
        assert sharding.memory_kind == PINNED
        arrays.append(put(array, sharding))
        return arrays[-1]

    monkeypatch.setattr(staging.jax, "device_put", device_put)
    devices = jax.devices()[6:2:-1]
    with staging_memory(Kind.PINNED, devices, 10_000, THREADS) as memory:
        (array,) = arrays
        assert array.devices() == {devices[-1]}
        part = memory[5_000:]
        address = part.ctypes.data - array.unsafe_buffer_pointer()
        assert 5_000 <= address < 5_000 + PAGE_BYTES
        assert address + 5_000 <= array.nbytes
        part[:] = np.arange(5_000) % 251
        np.testing.assert_array_equal(array[address : address + 5_000], np.arange(5_000) % 251)
    arrays.clear()
    alive = weakref.ref(array)
    del array, memory
    assert alive() is not None
    del part
    assert alive() is None


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory"), MemoryError()])
def test_memory_is_ordinary_if_no_pinned_memory_is_left(monkeypatch, error):
    def device_put(*_):
        raise error

    monkeypatch.setattr(staging.jax, "device_put", device_put)
    with staging_memory(Kind.PINNED, jax.devices(), NBYTES, THREADS) as memory:
        memory[:] = 1
    assert memory.shape == (NBYTES,)


@pytest.mark.parametrize("refusal", ["UNIMPLEMENTED: DmaMap not supported", "INTERNAL: Failed to register host memory"])
def test_memory_that_cannot_be_registered_is_ordinary(caplog, refusal):
    client = Client(refusal=refusal)
    with registered(client) as memory:
        memory[:] = 1
    assert memory.shape == (NBYTES,)
    assert not client.calls
    (record,) = caplog.records
    assert record.getMessage() == f"{NBYTES} bytes of host memory cannot be registered, loads take longer: {refusal}"


@pytest.mark.skipif(not hasattr(jax.devices()[0].client, "dma_map"), reason="jaxlib before 0.10.2")
def test_the_client_of_cpu_devices_refuses(caplog):
    with staging_memory(Kind.REGISTERED, jax.devices(), NBYTES, THREADS) as memory:
        assert memory.shape == (NBYTES,)
    (record,) = caplog.records
    assert "UNIMPLEMENTED" in record.getMessage()


def test_memory_that_cannot_be_unregistered_is_logged(caplog):
    client = Client()
    with registered(client):
        client.regions.clear()
    (record,) = caplog.records
    assert f"{NBYTES} bytes of host memory cannot be unregistered" in record.getMessage()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, jax.errors.JaxRuntimeError])
def test_a_block_that_fails_waits_for_transfers_that_nobody_knows_of(error):
    client = Client()
    with putting(client), pytest.raises(error), registered(client):
        client.reading += client.devices
        raise error("the block failed")
    assert [call[0] for call in client.calls] == ["map", "unmap"]


def test_a_block_that_ends_well_waits_for_nothing():
    client = Client()
    client.put = lambda *_: pytest.fail("waits")
    with putting(client), registered(client):
        pass
    assert [call[0] for call in client.calls] == ["map", "unmap"]


def test_the_wait_is_a_transfer_to_each_device(monkeypatch):
    """A real one, to CPU devices."""
    put, arrays, client = jax.device_put, [], Client()

    def device_put(array, fake):
        arrays.append(put(array, cpus[fake.id]))
        return arrays[-1]

    cpus = jax.devices()[: len(client.devices)]
    monkeypatch.setattr(staging.jax, "device_put", device_put)
    with pytest.raises(ValueError, match="failed"), registered(client):
        raise ValueError("failed")
    assert [array.devices() for array in arrays] == [{cpu} for cpu in cpus]
    assert all(array.is_ready() for array in arrays)


def test_a_wait_that_fails_hides_no_error():
    def at(step):
        if step == "in the wait":
            raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")

    client = Client(at)
    with putting(client), pytest.raises(ValueError, match="failed"), registered(client):
        raise ValueError("failed")
    assert not client.regions


STEPS = ["registers", "lets go"]


@pytest.mark.parametrize("step", [f"{when} the call {what}" for what in STEPS for when in ("before", "after")])
@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_of_a_call_leaves_nothing_registered(step, fails):
    left = [step]

    def at(here):
        if here in left:
            left.remove(here)
            raise KeyboardInterrupt

    client = Client(at)
    with putting(client), pytest.raises(KeyboardInterrupt), registered(client):
        client.reading += client.devices * fails
        if fails:
            raise ValueError
    assert not left
    assert not client.regions
    assert [call[0] for call in client.calls] == ["map", "unmap"] * (step != "before the call registers")


@pytest.mark.parametrize("step", ["before the wait", "in the wait"])
def test_an_interrupt_of_the_wait_waits_again(step):
    left = [step]

    def at(here):
        if here in left:
            left.remove(here)
            raise KeyboardInterrupt

    client = Client(at)
    with putting(client), pytest.raises(KeyboardInterrupt), registered(client):
        client.reading += client.devices
        raise ValueError
    assert not left
    assert [call[0] for call in client.calls] == ["map", "unmap"]


@contextmanager
def interrupted(number):
    """Interrupt this thread where Python looks for signals, in what is tested: a call begins, or one of C has ended.

    It looks for none when an exception is thrown into a generator. Yields a list with an item for each place.
    """
    files = {staging.__file__, contextmanager.__code__.co_filename}
    places = []

    def profile(frame, event, _):
        code = frame.f_code
        begins = event == "call" and not code.co_flags & inspect.CO_GENERATOR
        if code.co_filename in files and (begins or event == "c_return"):
            places.append(code)
            if len(places) == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield places
    finally:
        sys.setprofile(previous)


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_at_any_call_leaves_nothing_registered(young, fails):
    for number in itertools.count(1):
        client = Client()
        failures = suppress(KeyboardInterrupt, ValueError)
        with putting(client), failures, interrupted(number) as places, registered(client, PAGE_BYTES):
            client.reading += client.devices * fails
            if fails:
                raise ValueError
        gc.collect(0)  # what an interrupt in `contextlib` leaves goes with its traceback
        assert not client.regions
        assert [call[0] for call in client.calls] in ([], ["map", "unmap"])
        if len(places) < number:
            break
    assert number > 20


def test_two_restores_at_once_have_memory_of_their_own():
    client, together = Client(), threading.Barrier(2)
    addresses, errors = [[], []], []

    def restore(number):
        try:
            for _ in range(20):
                with registered(client) as memory:
                    memory[:] = number
                    addresses[number].append(memory.ctypes.data)
                    together.wait()
                    assert len(client.regions) == 2
                    assert (memory == number).all()
                    together.wait()
        except BaseException as error:
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=restore, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not client.regions
    assert len(client.calls) == 80
    assert all(one != other for one, other in zip(*addresses, strict=True))


@pytest.mark.parametrize("number", cross([30, 100], [30]))
def test_many_restores_leave_no_memory_and_no_threads(number):
    client = Client()

    def restore(at):
        with suppress(ValueError), registered(client):
            if at % 3 == 0:
                raise ValueError

    def mappings():
        with open("/proc/self/maps") as maps:
            return len(maps.readlines())

    with putting(client):
        for at in range(10):
            restore(at)
        before, threads = mappings(), threading.active_count()
        for at in range(number):
            restore(at)
    assert mappings() <= before + 5
    assert threading.active_count() == threads
    assert not client.regions
    assert len(client.calls) == 2 * (10 + number)
