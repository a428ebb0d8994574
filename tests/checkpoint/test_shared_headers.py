"""Headers that processes read once for all of them, with threads for processes."""

import numpy as np
import obstore
import pytest

import orbax_safetensors as ost
from orbax_safetensors.checkpoint import shared_headers
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.devices.agreement import new_key
from tests.support.files import random_bits, write, write_indexed
from tests.support.processes import Processes
from tests.support.servers.faults import Answer

RNG = np.random.default_rng(0)
FILES = 15
TENSORS = [{f"t{number}": random_bits(RNG, (8, 4), np.dtype(np.float32))} for number in range(FILES)]
NAMES = [f"model-{number:05}-of-{FILES:05}.safetensors" for number in range(1, FILES + 1)]
COUNT = 12


pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def wait(monkeypatch):
    """A short wait for processes that do not come."""
    monkeypatch.setattr(shared_headers, "_WAIT_SECONDS", 0.5)


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(shared_headers, "_published", _OfEach())
    return Processes(COUNT, monkeypatch)


class _OfEach:
    """What each thread, which stands for a process, has published."""

    def __init__(self):
        self._of = {}

    def _here(self):
        return self._of.setdefault(shared_headers.jax.process_index(), [])

    def __len__(self):
        return len(self._here())

    def append(self, key):
        self._here().append(key)

    def popleft(self):
        return self._here().pop(0)


@pytest.fixture
def model(web):
    (web.root / "x").mkdir()
    write_indexed(web.root / "x", TENSORS)
    return web


def requests(place):
    """How often each file was read."""
    names = [one.path.rpartition("/")[2] for one in place.server.log]
    return {name: names.count(name) for name in names}


def opened(url, key, who=range(COUNT), **more):
    return lambda index: read_checkpoint(url, more, shared_by=key) if index in who else None


def test_each_header_is_read_once(processes, model):
    found = processes.run(opened(f"{model.url}/x", new_key("test")))
    assert requests(model) == dict.fromkeys(
        ("model.safetensors", "model.safetensors.index.json"), COUNT
    ) | dict.fromkeys(NAMES, 1)
    alone = read_checkpoint(f"{model.url}/x")
    assert all((one.files, one.tensors) == (alone.files, alone.tensors) for one in found)


def test_more_processes_than_files(processes, web):
    write(web.root / "model.safetensors", TENSORS[0])
    found = processes.run(opened(f"{web.url}/model.safetensors", new_key("test")))
    assert requests(web) == {"model.safetensors": 1}
    assert all(list(one.tensors) == ["t0"] for one in found)


def test_a_process_that_does_not_come(processes, model, monkeypatch):
    monkeypatch.setattr(shared_headers, "_WAIT_SECONDS", 60)  # for those that come, however slow the machine is
    absent, parts = 5, 8
    processes.service.absent = f"/{absent}/0", [f"/{at}/0" for at in range(parts) if at != absent]
    found = processes.run(opened(f"{model.url}/x", new_key("test"), [at for at in range(COUNT) if at != absent]))
    assert found.pop(absent) is None
    assert all(len(one.tensors) == FILES for one in found)
    counted = requests(model)
    assert [counted[name] for name in NAMES] == [11 if at % parts == absent else 1 for at in range(FILES)]


def test_a_process_whose_read_fails(processes, model):
    model.server.fail(Answer(403), path=f"*{NAMES[3]}", times=1)
    found = processes.run(opened(f"{model.url}/x", new_key("test")))
    assert all(len(one.tensors) == FILES for one in found)
    counted = requests(model)
    assert [counted[name] for name in NAMES] == [1] * 3 + [1 + COUNT] + [1] * (FILES - 4)


@pytest.mark.parametrize("text", [b"\xff" * 16, b'{"a":[]} \xff     '])
def test_a_header_that_is_none_is_the_same_error_everywhere(processes, model, text):
    data = (model.root / "x" / NAMES[3]).read_bytes()
    (model.root / "x" / NAMES[3]).write_bytes(len(text).to_bytes(8, "little") + text + data)
    for error in processes.run(opened(f"{model.url}/x", new_key("test"))):
        assert isinstance(error, ost.HeaderError)
        assert NAMES[3] in str(error)


def test_without_a_service(processes, model, wait):
    processes.service.dead = True
    processes.service.key_value_set_bytes = None
    found = processes.run(opened(f"{model.url}/x", new_key("test")))
    assert all(len(one.tensors) == FILES for one in found)


def test_what_others_send_is_of_the_files_that_are_listed_here(processes, gcs, tmp_path, wait):
    write_indexed(tmp_path, TENSORS)
    for path in tmp_path.iterdir():
        obstore.put(gcs.store(), f"x/{path.name}", path.read_bytes())
    key = new_key("test")
    processes.run(opened(f"{gcs.url}/x", key, [0], **gcs.options))
    write(tmp_path / NAMES[0], {"t0": TENSORS[0]["t0"].reshape(4, 8)})
    obstore.put(gcs.store(), f"x/{NAMES[0]}", (tmp_path / NAMES[0]).read_bytes())
    found = processes.run(opened(f"{gcs.url}/x", key, [1], **gcs.options))
    assert found[1].tensors["t0"].shape == (4, 8)


def test_nothing_piles_up(processes, model):
    sizes = []
    for _ in range(5):
        processes.run(opened(f"{model.url}/x", new_key("test")))
        sizes.append(len(processes.service.values))
    assert sizes[1:] == [2 * sizes[0]] * 4


def test_local_files_are_read_by_each(processes, tmp_path):
    write_indexed(tmp_path, TENSORS)
    found = processes.run(opened(tmp_path, new_key("test")))
    assert all(len(one.tensors) == FILES for one in found)
    assert not processes.service.values
