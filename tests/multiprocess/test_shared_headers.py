"""Many processes load from a slow server: each header is read once for all, and nobody depends on another process."""

from tests.multiprocess.workers_shared_headers import values
from tests.support.files import write_indexed
from tests.support.launch import launch
from tests.support.servers.faults import Delay

PROCESSES = 12
FILES = 30
KILLED = 5
PARTS = 8  # of the headers, one for each of the first processes
# Seconds that a process waits for those that do not come: longer than any stall of a machine if all come.
WAITS = (60.0, 10.0)


def test_headers_of_many_processes_of_which_one_is_killed(web):
    count_requests(web, PROCESSES, FILES)


def count_requests(web, processes, files, timeout=150.0):
    """Launches the processes and judges all that they do; returns the seconds of each load, for a run by hand."""
    urls = []
    for name in ("first", "second"):
        (web.root / name).mkdir()
        write_indexed(web.root / name, [{name: array} for name, array in values(files, processes).items()])
        urls.append(f"{web.url}/{name}")
    web.server.fail(Delay(0.1), times=None)
    job = {"urls": urls, "files": files, "killed": KILLED, "waits": WAITS}
    found = launch(
        "tests.multiprocess.workers_shared_headers:run",
        job,
        processes=processes,
        devices=1,
        timeout=timeout,
        killed=[KILLED],
    )
    assert len(found) == processes - 1
    assert [one["wrong"] for one in found] == [[]] * (processes - 1)
    assert max(one["seconds"][1] for one in found) < WAITS[0]
    # A read of a header asks for the file's first bytes; one of a tensor begins behind the header.
    opened = [one.path for one in web.server.log if one.range and one.range[0] == 0]
    names = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    assert [opened.count(f"/first/{name}") for name in names] == [1] * files
    # All others read what the killed process has read and not sent.
    assert [opened.count(f"/second/{name}") for name in names] == [
        processes if number % PARTS == KILLED else 1 for number in range(files)
    ]
    for directory in ("first", "second"):
        assert opened.count(f"/{directory}/model.safetensors.index.json") == processes
    return [one["seconds"] for one in found]
