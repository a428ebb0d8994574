"""What restores do with files, they do with objects: every kind of checkpoint and request, on every store, bit by bit.

A place is filled once for all requests of a test, as some of the stores are slow. Files are the same on all of them.
"""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import obstore
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.storage import remote, retries
from tests.support.files import DTYPES, random_bits, write, write_indexed
from tests.support.quantized_layers import BF16, FAMILY, FP8, GRIDS, in_tree, quantized
from tests.support.quantized_layers import same as same_but_nan
from tests.support.servers.faults import Answer, Call, Cut, Delay, IgnoreRange, SetHeader
from tests.support.sharded_files import PIECES, WHOLE, write_pieces

pytestmark = pytest.mark.both_devices
RNG = np.random.default_rng(0)
STORES = ("web", "s3", "gcs", "azure")
W = random_bits(RNG, (16, 24), np.dtype(np.float32))
PLAIN = np.linspace(-3, 3, 16 * 8, dtype=np.float32).reshape(16, 8)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Retries at once, and requests so short that a restore takes several."""
    monkeypatch.setattr(retries, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(remote, "COST", dataclasses.replace(remote.COST, max_request_bytes=2**20))


@pytest.fixture(params=STORES)
def place(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def filled(place, tmp_path):
    """Puts what a function writes into a directory into a directory of the store."""

    def fill(make, name="x"):
        directory = tmp_path / name
        directory.mkdir()
        make(directory)
        for path in directory.iterdir():
            if place.root is not None:
                (place.root / name).mkdir(exist_ok=True)
                (place.root / name / path.name).write_bytes(path.read_bytes())
            else:
                obstore.put(place.store(), f"{name}/{path.name}", path.read_bytes())
        return f"{place.url}/{name}"

    return fill


def restore(place, url, item=None, *, options=None, family=None, **kwargs):
    own = ost.SafetensorsOptions(storage_options={**place.options, **(options or {})})
    with ost.SafetensorsCheckpointer(options=own, family=family) as checkpointer:
        return checkpointer.restore(url, args=ost.SafetensorsRestore(item, **kwargs))


def same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.asarray(found).tobytes() == expected.tobytes()


def struct(array, sharding, **changes):
    return jax.ShapeDtypeStruct(changes.get("shape", array.shape), changes.get("dtype", array.dtype), sharding=sharding)


def test_every_dtype(place, filled, mesh):
    tensors = {name: random_bits(RNG, (8, 4), dtype) for name, dtype in DTYPES.items()}
    names = sorted(tensors)
    parts = [{name: tensors[name] for name in names[number::3]} for number in range(3)]
    url = filled(lambda directory: write_indexed(directory, parts))
    with jax.enable_x64(True):
        for spec in (P("x", "y"), P(None, "x"), P()):
            restored = restore(place, url, {n: struct(a, NamedSharding(mesh, spec)) for n, a in tensors.items()})
            for name, array in tensors.items():
                same(restored[name], array)


def test_every_request(place, filled, mesh):
    """Casts, padding and truncating, scalars, NumPy arrays, parts, and what `restore_args` say."""
    tensors = {"w": W, "plain": PLAIN, "step": np.array(7, np.int32)}
    url = filled(lambda directory: write_indexed(directory, [{name: array} for name, array in tensors.items()]))
    sharding = NamedSharding(mesh, P("x", "y"))
    own = ost.SafetensorsOptions(storage_options=place.options)
    with ost.SafetensorsCheckpointer(options=own) as checkpointer:
        args = {
            "w": ocp.ArrayRestoreArgs(sharding=sharding, global_shape=(24, 16), strict=False),
            "plain": ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=P("y"), dtype=jnp.bfloat16),
            "step": ocp.RestoreArgs(restore_type=int),
        }
        restored = checkpointer.restore(url, restore_args=args)
        padded = np.zeros((24, 16), np.float32)
        padded[:16] = W[:, :16]
        same(restored["w"], padded)
        same(restored["plain"], PLAIN.astype(ml_dtypes.bfloat16))
        assert restored["step"] == 7
        assert restored["plain"].sharding.spec == P("y")
        args = {"plain": ocp.RestoreArgs(restore_type=np.ndarray)}
        same(checkpointer.restore(url, restore_args=args, partial_restore=True)["plain"], PLAIN)
        item = {"w": ocp.PLACEHOLDER, "plain": struct(PLAIN, sharding), "step": ocp.PLACEHOLDER}
        restored = checkpointer.restore(url, item=item)
        assert restored["w"] is ocp.PLACEHOLDER
        same(restored["plain"], PLAIN)
        with pytest.raises(ost.TensorMismatchError, match="missing"):
            checkpointer.restore(url, item={"missing": struct(W, sharding)})


def test_a_quantised_checkpoint_of_a_family(place, filled, mesh):
    shape, expand = GRIDS["blocks"]
    stored, plain = quantized(np.random.default_rng(11), shape, expand)

    def make(directory):
        write(directory / "model.safetensors", stored)
        (directory / "config.json").write_text(json.dumps({"quantization_config": FP8}))

    url = filled(make)
    expected = in_tree({name: np.asarray(array).astype(BF16) for name, array in plain.items()})
    item = jax.tree.map(
        lambda array: struct(array, NamedSharding(mesh, P("y"))), {"layers": {"norm": expected["layers"]["norm"]}}
    )
    sharded = {
        "layers": {"up": struct(expected["layers"]["up"], NamedSharding(mesh, P(None, None, "y"))), **item["layers"]}
    }
    restored = restore(place, url, sharded, family=FAMILY)
    jax.tree.map(same_but_nan, restored, expected)


def test_pieces_of_tensors(s3_or_gcs_or_azure, mesh, tmp_path):
    """A plain server does not tell which files of pieces there are."""
    place = s3_or_gcs_or_azure
    write_pieces(tmp_path, PIECES)
    for path in tmp_path.iterdir():
        obstore.put(place.store(), f"x/{path.name}", path.read_bytes())
    item = {name: struct(array, NamedSharding(mesh, P())) for name, array in WHOLE.items()}
    item["grid"] = struct(WHOLE["grid"], NamedSharding(mesh, P("x", "y")))
    restored = restore(place, f"{place.url}/x", item)
    for name, array in WHOLE.items():
        same(restored[name], array)


@pytest.fixture(params=STORES[1:])
def s3_or_gcs_or_azure(request):
    return request.getfixturevalue(request.param)


def test_what_is_saved_in_any_way_comes_back_in_any_other(s3_or_gcs_or_azure, mesh):
    place = s3_or_gcs_or_azure
    own = ost.SafetensorsOptions(storage_options=place.options)
    specs = (P("x", "y"), P(None, "y"), P(("y", "x")), P())
    with ost.SafetensorsCheckpointer(options=own) as checkpointer:
        for number, (saved, restored) in enumerate(zip(specs, specs[1:] + specs[:1], strict=True)):
            tree = {"w": jax.device_put(W, NamedSharding(mesh, saved)), "b": {"c": PLAIN, "d": 3}}
            url = f"{place.url}/{number}"
            args = ocp.SaveArgs(dtype=jnp.bfloat16) if number else ocp.SaveArgs()
            save_args = {"w": ocp.SaveArgs(), "b": {"c": args, "d": ocp.SaveArgs()}}
            checkpointer.save(
                url, args=ost.SafetensorsSave(tree, save_args, max_file_bytes=1000 if number % 2 else 10**9)
            )
            item = {
                "w": struct(W, NamedSharding(mesh, restored)),
                "b": {"c": struct(PLAIN, NamedSharding(mesh, restored), dtype=np.float32), "d": 0},
            }
            found = checkpointer.restore(url, item=item)
            same(found["w"], W)
            same(found["b"]["c"], PLAIN if not number else PLAIN.astype(ml_dtypes.bfloat16).astype(np.float32))
            assert found["b"]["d"] == 3


# --- whole restores, and what goes wrong on the way ---

LONG = random_bits(RNG, (8, 2**17), np.dtype(np.float32))  # longer than what comes with opening

FAULTS = {
    "latency": ([(Delay(0.1), 0, 1000)], True),
    "resets": ([(Cut(1000, "reset"), 1, 2), (Cut(None, "reset"), 4, 1)], True),
    "truncated": ([(Cut(1000, "close"), 1, 2)], True),
    "a burst of 429": ([(Answer(429, {"Retry-After": "0"}), 1, 4)], True),
    "a burst of 503": ([(Answer(503), 0, 4)], True),
    "stalls": ([(Cut(1000, "stall"), 1, 1)], True),
    "another range once": ([(SetHeader("Content-Range", "bytes 1-10/20"), 1, 1)], True),
    "another range": ([(SetHeader("Content-Range", "bytes 1-10/20"), 1, None)], False),
    "no range": ([(IgnoreRange(), 1, None)], False),
    "503 for ever": ([(Answer(503), 3, None)], False),
    "truncated for ever": ([(Cut(1000, "close"), 3, None)], False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_right_bytes_or_an_error_in_time(place, filled, mesh, fault):
    url = filled(lambda directory: write(directory / "model.safetensors", {"long": LONG}))
    rules, comes_back = FAULTS[fault]
    for one, skip, times in rules:
        place.server.fail(one, method="GET", path="*model.safetensors", skip=skip, times=times)
    item = {"long": struct(LONG, NamedSharding(mesh, P("x")))}
    # So long as no healthy answer takes, on any machine.
    options = {"read_timeout": "10s", "max_retries": 5}
    if comes_back:
        same(restore(place, url, item, options=options)["long"], LONG)
    else:
        with pytest.raises(ost.StorageError, match=f"{url}/model.safetensors: "):
            restore(place, url, item, options=options)


def test_an_object_that_is_replaced_half_way(s3_or_gcs_or_azure, filled_other, mesh):
    place = s3_or_gcs_or_azure
    before, after = filled_other({"long": LONG}), filled_other({"long": LONG[::-1]})
    obstore.put(place.store(), "x/model.safetensors", before)
    place.server.fail(
        Call(lambda: obstore.put(place.store(), "x/model.safetensors", after)),
        method="GET",
        path="*model.safetensors",
        skip=2,
    )
    own = ost.SafetensorsOptions(storage_options=place.options, threads=1)
    item = {"long": struct(LONG, NamedSharding(mesh, P("x")))}
    with (
        ost.SafetensorsCheckpointer(options=own) as checkpointer,
        pytest.raises(ost.StorageError, match=f"{place.url}/x/model.safetensors: changed while it was in use"),
    ):
        checkpointer.restore(f"{place.url}/x", item=item)


@pytest.fixture
def filled_other(tmp_path):
    def make(tensors):
        write(tmp_path / "x", tensors)
        return (tmp_path / "x").read_bytes()

    return make


def test_credentials_that_expire(s3_or_gcs_or_azure, filled_other, mesh):
    place = s3_or_gcs_or_azure
    obstore.put(place.store(), "x/model.safetensors", filled_other({"long": LONG}))
    place.server.fail(place.expired, method="GET", path="*model.safetensors", skip=1, times=None)
    with pytest.raises(ost.StorageError, match=f"{place.url}/x/model.safetensors: reading .*{place.expired.status}"):
        restore(place, f"{place.url}/x", {"long": struct(LONG, NamedSharding(mesh, P()))})


def test_the_server_has_sent_what_was_planned(place, filled, mesh):
    tensors = {"long": LONG, "w": W}
    url = filled(lambda directory: write(directory / "model.safetensors", tensors))
    item = {
        "long": struct(LONG, NamedSharding(mesh, P("x", "y"))),
        "w": struct(W, NamedSharding(mesh, P("y"))),
    }
    own = ost.SafetensorsOptions(storage_options=place.options)
    (cost,) = ost.plan_restore(url, item, options=own).processes
    place.server.clear()
    restore(place, url, item)
    log = [one for one in place.server.log if one.path.endswith("model.safetensors")]
    assert {one.process for one in log} == {os.getpid()}
    data = sum(one.sent for one in log if one.method == "GET")
    nbytes = len(LONG.tobytes()) + len(W.tobytes())
    assert cost.read_bytes == nbytes
    # What comes with opening is asked for again where it is part of a longer range.
    assert data == cost.read_bytes + remote.HEAD_BYTES
