"""Processes of one JAX program, as threads of this one: for what they agree on, without starting any."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax

from orbax_safetensors.devices import agreement
from tests.support.hang import SECONDS


class Service:
    """The key-value store and the barriers of `jax.distributed`, in memory.

    A key is set once. Nobody waits for a barrier that has failed, and with `dead` nobody waits at all. `absent` is the
    end of a key that does not come, and the ends of those that do: once they are there, a wait for it fails.
    """

    def __init__(self, processes):
        self.values, self.barriers, self.dead, self.absent = {}, {}, False, None
        self._processes, self._lock = processes, threading.Lock()

    def key_value_set(self, key, value):
        if isinstance(value, str):
            value.encode()  # as the real one takes no lone surrogates
        with self._lock:
            if key in self.values:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def key_value_set_bytes(self, key, value):
        assert isinstance(value, bytes)
        assert len(value) < 4 * 2**20  # as the real one takes no more
        self.key_value_set(key, value)

    def key_value_try_get_bytes(self, key):
        return self.key_value_try_get(key)

    def blocking_key_value_get_bytes(self, key, milliseconds):
        until = time.monotonic() + milliseconds / 1000
        keys = {key}
        if self.absent and key.endswith(self.absent[0]):
            keys = {key.removesuffix(self.absent[0]) + end for end in self.absent[1]}
        while not keys <= self.values.keys() and not self.dead and time.monotonic() < until:
            time.sleep(0.002)
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        return self.values[key]

    def key_value_dir_get(self, directory):
        return [(key, value) for key, value in self.values.items() if key.startswith(f"{directory}/")]

    def key_value_increment(self, key, by):
        with self._lock:
            self.values[key] = str(int(self.values.get(key, 0)) + by)
            return int(self.values[key])

    def key_value_delete(self, key):
        with self._lock:
            for name in [name for name in self.values if name == key or name.startswith(f"{key}/")]:
                del self.values[name]

    def wait_at_barrier(self, name, milliseconds, process_ids=None):
        with self._lock:
            parties = self._processes if process_ids is None else len(process_ids)
            barrier = self.barriers.setdefault(name, threading.Barrier(parties))
        if self.dead:
            raise RuntimeError("UNAVAILABLE: a process has died")
        try:
            barrier.wait(min(SECONDS, milliseconds / 1000))
        except threading.BrokenBarrierError:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out") from None


class Processes:
    """Runs functions of a process's number, each in a thread that takes itself for that process."""

    def __init__(self, count, monkeypatch):
        self.count, self.service, self._here = count, Service(count), threading.local()
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(jax, "process_index", lambda: self._here.index)
        monkeypatch.setattr(agreement.global_state, "client", self.service)

    def run(self, function):
        """What every process returned or raised, in their order."""

        def work(index):
            self._here.index = index
            try:
                return function(index)
            except BaseException as error:
                return error

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(work, range(self.count)))
