"""Restoring from a server 20 ms away, and saving to it: this package beside clients that only move the same bytes.

    python benchmarks/remote.py [--quick] [--rounds 5] [--directory DIR] [--json FILE] [--only SCENARIO ...]

The server is a process of its own on this machine (`serve.py`), which waits before each answer. In every round the
package comes first, and what it asked the server for is what the others then ask it for: by the server's count, all
make the same requests except those that open files. They leave the bytes in the order of the files, and make no
arrays: shards that are not contiguous there are more work, which only the package does. What is saved is held by the
server, read back from it and compared. `README.md` says more.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(os.fspath(Path(__file__).parents[1]))

import jax
import loaders
import numpy as np
from checkpoints import add_directory, llama, warm, write
from restore import PACKAGE, Runs, seconds, versions
from rich.console import Console
from rich.table import Table
from safetensors import deserialize
from safetensors.numpy import load_file
from serve import ASKED, BUCKET

from tests.support.servers.processes import serving

BARE, BARE_THREADS, TENSORSTORE, FSSPEC = "obstore", "obstore, threads", "TensorStore", "fsspec"
# As many requests at once as the package makes of a store, and parts of one object that are on their way at once.
REQUESTS = 64
PARTS, PART_BYTES = 8, 8 * 2**20
TARGET = 1.3
TIMEOUT_SECONDS = 300
# Opening a file takes a request for its first bytes, which nobody else needs.
OPENING_BYTES = 512 * 2**10
# Of one file that is saved: with more than the longest tensor, about as many files as there were.
MAX_FILE_BYTES = 270 * 10**6


@dataclass(frozen=True)
class Job:
    """What to fetch from `server`, which has what is in `directory`, or to save there.

    `layout` and `devices` are those of `loaders.Job`, for the package; `ranges` those of the others: the name of a
    file, and where its bytes begin and end.
    """

    client: str
    server: str
    directory: str
    layout: str
    devices: int
    ranges: list[tuple[str, int, int]]
    pretouch_bytes: int
    saves: bool

    @property
    def url(self) -> str:
        return f"{self.server}/{Path(self.directory).name}"

    @property
    def local(self) -> loaders.Job:
        return loaders.Job("", self.directory, self.layout, self.devices)


Arrays = dict[str, Any]
Load = Callable[[], Arrays]


# Each client gets ready off the clock and returns what the clock is for.


def package(job: Job) -> Load:
    """This package: sharded arrays."""
    import orbax_safetensors as ost

    wanted = loaders.abstract_arrays(job.local)
    return lambda: ost.SafetensorsHandler().restore(job.url, ost.SafetensorsRestore(wanted))


def memory_of(job: Job) -> Arrays:
    """Fresh memory for each file."""
    return {path.name: loaders.anonymous(path.stat().st_size) for path in loaders.files_of(job.local)}


def bare(job: Job) -> Load:
    """obstore's own client, and one event loop that copies what comes."""
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore(job.url, client_options={"allow_http": True})

    async def fetch(out: Arrays) -> None:
        free = asyncio.Semaphore(REQUESTS)

        async def one(name: str, begin: int, end: int) -> None:
            async with free:
                data = await obstore.get_range_async(store, name, start=begin, end=end)
                out[name][begin:end] = np.frombuffer(data, np.uint8)

        await asyncio.gather(*(one(*wanted) for wanted in job.ranges))

    def load() -> Arrays:
        out = memory_of(job)
        asyncio.run(fetch(out))
        return out

    return load


def bare_threads(job: Job) -> Load:
    """obstore's own client, with a thread for each request in flight."""
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore(job.url, client_options={"allow_http": True})

    def load() -> Arrays:
        out = memory_of(job)

        def one(wanted: tuple[str, int, int]) -> None:
            name, begin, end = wanted
            data = obstore.get_range(store, name, start=begin, end=end)
            np.copyto(out[name][begin:end], np.frombuffer(data, np.uint8))

        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(one, job.ranges))
        return out

    return load


def tensorstore(job: Job) -> Load:
    """TensorStore's key-value store over HTTP."""
    import tensorstore as ts

    limits = ts.Context({"http_request_concurrency": {"limit": REQUESTS}})
    store = ts.KvStore.open({"driver": "http", "base_url": job.url + "/"}, context=limits).result()

    def load() -> Arrays:
        out = memory_of(job)
        waiting = [store.read(name, byte_range=slice(begin, end)) for name, begin, end in job.ranges]
        waiting.reverse()
        for name, begin, end in job.ranges:
            out[name][begin:end] = np.frombuffer(waiting.pop().result().value, np.uint8)
        return out

    return load


def fsspec(job: Job) -> Load:
    """fsspec's file system over HTTP, which needs aiohttp; it holds all bytes before any is copied."""
    from fsspec.implementations.http import HTTPFileSystem

    files = HTTPFileSystem()

    def load() -> Arrays:
        out = memory_of(job)
        names, begins, ends = (list(column) for column in zip(*job.ranges, strict=True))
        urls = [f"{job.url}/{name}" for name in names]
        found = files.cat_ranges(urls, begins, ends, batch_size=REQUESTS, on_error="raise")
        for (name, begin, end), data in zip(job.ranges, found, strict=True):
            out[name][begin:end] = np.frombuffer(data, np.uint8)
        return out

    return load


def save_package(job: Job) -> Load:
    """This package."""
    import orbax_safetensors as ost

    wanted = loaders.abstract_arrays(job.local)
    tensors = {name: array for path in loaders.files_of(job.local) for name, array in load_file(path).items()}
    arrays = {name: jax.device_put(tensors[name], wanted[name].sharding) for name in wanted}
    place = {"base_url": job.server, "bearer_token": "any"}
    handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(storage_options=place))

    def save() -> Arrays:
        handler.save(f"gs://{BUCKET}/{PACKAGE}", ost.SafetensorsSave(arrays, max_file_bytes=MAX_FILE_BYTES))
        return {}

    return save


def save_bare(job: Job) -> Load:
    """obstore's own client, which is given the bytes of all files at once."""
    import obstore
    from obstore.store import GCSStore

    store = GCSStore(
        BUCKET, config={"base_url": job.server, "bearer_token": "any"}, client_options={"allow_http": True}
    )
    files = {path.name: path.read_bytes() for path in loaders.files_of(job.local)}

    async def put() -> None:
        puts = (
            obstore.put_async(
                store, f"{BARE}/{name}", data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS
            )
            for name, data in files.items()
        )
        await asyncio.gather(*puts)

    def save() -> Arrays:
        asyncio.run(put())
        return {}

    return save


CLIENTS: dict[str, Callable[[Job], Load]] = {
    PACKAGE: package,
    BARE: bare,
    BARE_THREADS: bare_threads,
    TENSORSTORE: tensorstore,
    FSSPEC: fsspec,
}
SAVERS: dict[str, Callable[[Job], Load]] = {PACKAGE: save_package, BARE: save_bare}
NEEDS = {FSSPEC: ("fsspec", "aiohttp")}
SCENARIOS = {
    "whole": ("whole, 1 device", "leading", 1),
    "leading": ("leading dimension, 8 devices", "leading", 8),
    "inner": ("last dimension, 8 devices", "inner", 8),
    "save": ("saving, leading dimension, 8 devices", "leading", 8),
}


def once(job: Job) -> dict[str, Any]:
    """One client, in this process. Times in seconds, memory in bytes above what there was before."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job.devices)
    jax.devices()
    load = (SAVERS if job.saves else CLIENTS)[job.client](job)
    warm(Path(job.directory))
    loaders.fresh(job.pretouch_bytes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    asked(job.server)
    before, others, cpu, began = loaders.memory(), busy_seconds(), time.process_time(), time.monotonic()
    arrays = load()
    jax.block_until_ready(arrays)
    for array in arrays.values():
        loaders.touch(array)
    took, cpu, others, after = (
        time.monotonic() - began,
        time.process_time() - cpu,
        busy_seconds() - others,
        loaders.memory(),
    )
    told = asked(job.server)
    if job.saves:
        check_saved(job, {path for method, path, *_ in told["asked"] if method == "POST"})
    elif job.client == PACKAGE:
        loaders.check(job.local, arrays, loaders.abstract_arrays(job.local))
    else:
        for name, begin, end in job.ranges:
            expected = np.fromfile(Path(job.directory) / name, np.uint8, end - begin, offset=begin)
            assert np.array_equal(arrays[name][begin:end], expected), (name, begin)
    moving = [one for one in told["asked"] if not is_opening(*one)]
    return {
        "seconds": took,
        "cpu_seconds": cpu,
        "server_cpu_seconds": told["cpu_seconds"],
        "others_cpu_seconds": others - cpu - told["cpu_seconds"],
        "peak_bytes": after["VmHWM"] - before["VmRSS"],
        "requests": len(moving),
        "other_requests": len(told["asked"]) - len(moving),
        "nbytes": sum(nbytes for *_, nbytes in moving),
        "ranges": [(path.rpartition("/")[2], begin, end) for _, path, begin, end, _ in moving],
    }


def is_opening(method: str, path: str, begin: int, end: int, nbytes: int) -> bool:
    """Whether a request moves no data: it opens a file, or begins or ends an upload."""
    return method == "POST" or not path.endswith(".safetensors") or (begin, end) == (0, OPENING_BYTES)


def busy_seconds() -> float:
    """Seconds that the processors have been busy, all of them together."""
    user, nice, system, _, _, interrupt, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")


def check_saved(job: Job, paths: set[str]) -> None:
    """Raises unless the objects at `paths` have all tensors of the directory, bit by bit. Removes them."""
    stored = {name: entry for path in loaders.files_of(job.local) for name, entry in deserialize(path.read_bytes())}
    for path in paths:
        url = job.server + urllib.parse.quote(path)
        with urllib.request.urlopen(url) as answer:
            for name, entry in deserialize(answer.read()):
                assert entry == stored.pop(name), name
        urllib.request.urlopen(urllib.request.Request(url, method="DELETE")).close()
    assert not stored, stored.keys()


def asked(server: str) -> dict[str, Any]:
    """What a server was asked for since the last time, and the processor time that it took."""
    with urllib.request.urlopen(server + ASKED) as answer:
        return json.load(answer)


def measure(job: Job) -> dict[str, Any]:
    """One client in a process of its own. Raises RuntimeError where it fails."""
    command = [sys.executable, __file__, "--once", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{job.client} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(name: str, server: str, directory: Path, rounds: int, clients: list[str]) -> Runs:
    """All runs of a scenario, by client. Fails where a client did not ask for what the package had asked for."""
    _, layout, devices = SCENARIOS[name]
    saves = name == "save"
    clients = [client for client in clients if not saves or client in SAVERS]
    pretouch = 2 * sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    runs: Runs = {client: [] for client in clients}
    for _ in range(rounds):
        ranges: list[tuple[str, int, int]] = []
        for client in clients:
            result = measure(Job(client, server, os.fspath(directory), layout, devices, ranges, pretouch, saves))
            found = result.pop("ranges")
            ranges = ranges or found
            assert saves or sorted(found) == sorted(ranges), client
            runs[client].append(result)
    return runs


def show(name: str, runs: Runs, console: Console) -> None:
    """The table of a scenario. Ratios are the median of those within each round."""
    table = Table(title=SCENARIOS[name][0])
    columns = ("client", "s", "GB/s", f"times {BARE}", "in the rounds", "CPU s", "server", "others", "requests", "peak")
    for column in columns:
        table.add_column(column, justify="left" if column == "client" else "right")
    for client, own in runs.items():
        took, ratios = seconds(runs, client), sorted(in_rounds(runs, client))
        table.add_row(
            client,
            f"{took:.3f}",
            f"{own[0]['nbytes'] / took / 1e9:.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            *(
                f"{statistics.median(one[f'{whose}cpu_seconds'] for one in own):.2f}"
                for whose in ("", "server_", "others_")
            ),
            f"{own[0]['requests']} + {own[0]['other_requests']}",
            "" if name == "save" else f"{max(one['peak_bytes'] for one in own) / own[0]['nbytes']:.2f}",
        )
    console.print(table)


def in_rounds(runs: Runs, client: str) -> list[float]:
    """What a client took in each round, as a multiple of what obstore took."""
    return [one["seconds"] / other["seconds"] for one, other in zip(runs[client], runs[BARE], strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_directory(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of 0.1 GB: shows that everything runs")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(once(Job(**json.loads(args.once)))))
        return 0
    console = Console(width=140)
    directory = args.directory / ("orbax-safetensors-bench-quick" if args.quick else "orbax-safetensors-bench")
    small = {"layers": 2, "hidden": 1024, "feed_forward": 4096, "vocabulary": 16_384}
    checkpoint = directory / "remote"
    write(checkpoint, llama(**(small if args.quick else {"layers": 6, "vocabulary": 64_000})), files=4)
    clients = [name for name in CLIENTS if all(map(importlib.util.find_spec, NEEDS.get(name, ())))]
    report: dict[str, Any] = {"versions": versions(), "scenarios": {}}
    console.print(report["versions"])
    command = [sys.executable, os.fspath(Path(__file__).with_name("serve.py")), os.fspath(directory)]
    with serving(command, r"(http:\S+)") as server:
        for name in args.only:
            runs = run(name, server, checkpoint, 1 if args.quick else args.rounds, clients)
            show(name, runs, console)
            found = statistics.median(in_rounds(runs, PACKAGE))
            if not args.quick:  # which takes no longer than starting up
                verdict = "met    " if found <= TARGET else "NOT MET"
                console.print(f"  {verdict} times {BARE} <= {TARGET}: {found:.2f}", markup=False)
            report["scenarios"][name] = {"runs": runs, "load": os.getloadavg()}
            if args.json:
                args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
