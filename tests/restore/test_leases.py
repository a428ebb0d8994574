"""Leases of files: who holds them, and who waits for them."""

import contextlib
import threading

import pytest

from orbax_safetensors.restore.leases import Leases
from orbax_safetensors.storage.leased_mapping import LeasedMapping
from orbax_safetensors.storage.local import LocalFile


def test_a_lease_does_not_end_while_it_is_looked_at(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(4096))
    real, threads = LeasedMapping.is_wanted.fget, []

    def is_wanted(mapping):
        threads.append(threading.Thread(target=leases.let_go, args=([0], [])))
        threads[0].start()
        threads[0].join(0.1)
        return real(mapping)

    with contextlib.closing(LocalFile(str(tmp_path / "file"))) as file:
        leases = Leases()
        if leases.hold(0, file) is None:
            pytest.skip("the file system of temporary files has no leases")
        monkeypatch.setattr(LeasedMapping, "is_wanted", property(is_wanted))
        assert leases.wanted == []
        threads[0].join()
        assert leases.wanted == []
