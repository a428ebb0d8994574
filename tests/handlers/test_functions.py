"""`ost.load` and `ost.save`: a checkpoint in one call, the same bits as the reference reads and writes."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import orbax_safetensors as ost
from tests.support.compare import assert_same_arrays, names_of
from tests.support.files import write
from tests.support.roots import TESTDATA
from tests.support.small_model import STEP, B, W

MAXTEXT = TESTDATA / "maxtext" / "qwen3"
CONFIG = json.loads((MAXTEXT / "hf" / "config.json").read_text())


@pytest.fixture
def tree(line):
    return {
        "layer": {"w": jax.device_put(W, NamedSharding(line, P(None, "d"))), "b": B},
        "steps": [7, None],
    }


def test_a_directory_without_a_target(directory):
    assert_same_arrays(ost.load(directory), {"layer.w": W, "layer.b": B, "step": STEP})


def test_one_file(tmp_path):
    file = tmp_path / "model.safetensors"
    write(file, {"w": W})
    assert_same_arrays(ost.load(str(file)), load_file(file))


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ost.save("saved", {"w": W})
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert_same_arrays(ost.load("saved"), {"w": W})


@pytest.mark.parametrize(
    "of", [jax.ShapeDtypeStruct, lambda shape, dtype, sharding: ocp.ArrayRestoreArgs(sharding=sharding)]
)
def test_a_tree(directory, line, of):
    shardings = {"w": NamedSharding(line, P("d")), "b": NamedSharding(line, P())}
    layer = {name: of(array.shape, array.dtype, sharding=shardings[name]) for name, array in (("w", W), ("b", B))}
    restored = ost.load(directory, {"layer": layer, "step": ocp.PLACEHOLDER})
    assert restored["step"] is ocp.PLACEHOLDER
    assert_same_arrays(restored["layer"], {"w": W, "b": B})
    assert {name: array.sharding for name, array in restored["layer"].items()} == shardings


def test_a_tree_of_shardings(directory, line):
    """As `nnx.get_named_sharding` returns them: arrays of the stored shapes and dtypes."""
    shardings = {"layer": {"w": NamedSharding(line, P("d")), "b": NamedSharding(line, P())}}
    restored = ost.load(directory, shardings | {"step": None})
    assert_same_arrays(restored["layer"], {"w": W, "b": B})
    assert {name: array.sharding for name, array in restored["layer"].items()} == shardings["layer"]


def test_one_sharding_for_all(directory, line):
    replicated = NamedSharding(line, P())
    restored = ost.load(directory, replicated)
    assert_same_arrays(restored, {"layer.w": W, "layer.b": B, "step": STEP})
    assert {array.sharding for array in restored.values()} == {replicated}


def test_a_layout_for_all(tmp_path):
    write(tmp_path / "model.safetensors", {"w": W})
    layout = jax.experimental.layout.Layout(major_to_minor=(1, 0))
    single = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    restored = ost.load(tmp_path, jax.experimental.layout.Format(layout, single))["w"]
    assert restored.format.layout.major_to_minor == (1, 0)
    assert restored.devices() == {jax.devices()[3]}
    assert_same_arrays(restored, W)


def test_a_function_of_name_and_shape(directory, line):
    called = {}

    def sharding(name, shape):
        called[name] = shape
        return NamedSharding(line, P("d")) if shape and shape[0] % 8 == 0 else None

    restored = ost.load(directory, sharding)
    assert called == {"layer.w": W.shape, "layer.b": B.shape, "step": STEP.shape}
    assert_same_arrays(restored, {"layer.w": W, "layer.b": B, "step": STEP})
    assert {name: isinstance(array, jax.Array) for name, array in restored.items()} == {
        name: bool(shape) and shape[0] % 8 == 0 for name, shape in called.items()
    }


def test_a_function_for_a_model_s_tree(line):
    """Names are paths of the family's tree."""
    with np.load(MAXTEXT / "mt_scanned.npz") as arrays:
        expected = {name.replace("-", "."): arrays[name] for name in arrays}

    def sharding(name, shape):
        return NamedSharding(
            line, P(*("d" if name.endswith("wo.kernel") and size % 8 == 0 else None for size in shape[:1]))
        )

    restored = ost.load(MAXTEXT / "hf", sharding, family="maxtext")
    flat = names_of(restored)
    assert flat.keys() == expected.keys()
    for name, array in expected.items():
        assert isinstance(flat[name], jax.Array)
        assert np.asarray(flat[name]).tobytes() == array.tobytes()


def test_the_tree_that_was_saved(tmp_path, tree, line):
    ost.save(tmp_path / "saved", tree)
    restored = ost.load(tmp_path / "saved")
    assert_same_arrays(restored, tree)
    assert restored["layer"]["w"].sharding == tree["layer"]["w"].sharding
    assert restored["steps"] == tree["steps"]


def test_the_tree_that_was_saved_elsewhere(tmp_path, tree, line):
    """A sharding for all arrays, those that were NumPy's as well; scalars stay scalars."""
    ost.save(tmp_path / "saved", tree)
    replicated = NamedSharding(line, P())
    restored = ost.load(tmp_path / "saved", replicated)
    assert_same_arrays(restored, tree)
    assert {array.sharding for array in restored["layer"].values()} == {replicated}
    assert restored["steps"] == tree["steps"]


def test_a_tree_that_can_be_called(directory):
    """A module of Equinox, say, which is a tree with a `__call__`."""

    @jax.tree_util.register_pytree_with_keys_class
    class Module(dict):
        def __call__(self):
            raise AssertionError

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.DictKey(name), leaf) for name, leaf in self.items()], tuple(self)

        def tree_flatten(self):
            return list(self.values()), tuple(self)

        @classmethod
        def tree_unflatten(cls, names, leaves):
            return cls(zip(names, leaves, strict=True))

    described = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in (("w", W), ("b", B))}
    restored = ost.load(directory, Module(layer=Module(described), step=np.array(0)))
    assert type(restored["layer"]) is Module
    assert_same_arrays(dict(restored["layer"]), {"w": W, "b": B})


def test_a_save_is_what_the_reference_reads(tmp_path, tree):
    ost.save(tmp_path / "saved", tree, metadata={"author": "me"}, options=ost.SafetensorsOptions(alignment=8))
    assert_same_arrays(
        load_file(tmp_path / "saved" / "model.safetensors"), {"layer.w": W, "layer.b": B, "steps.0": np.array(7)}
    )
    assert ost.open_checkpoint(tmp_path / "saved").metadata == {"format": "pt", "author": "me"}


@pytest.mark.parametrize("word", ["force", "overwrite"])
def test_an_existing_directory(tmp_path, word):
    ost.save(tmp_path / "saved", {"w": W})
    with pytest.raises(ost.StorageError, match="already exists; pass force=True"):
        ost.save(tmp_path / "saved", {"w": B})
    assert_same_arrays(ost.load(tmp_path / "saved"), {"w": W})
    with pytest.raises(ost.TensorMismatchError, match="no leaves"):
        ost.save(tmp_path / "saved", {}, **{word: True})
    assert_same_arrays(ost.load(tmp_path / "saved"), {"w": W})
    ost.save(tmp_path / "saved", {"w": B}, **{word: True})
    assert_same_arrays(ost.load(tmp_path / "saved"), {"w": B})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda name, shape: 3, "expected a sharding, found 3"),
        ({"layer": {"x": np.zeros(3)}}, "not in the checkpoint: 'layer.x'"),
        ("cpu", "expected a tree, a mesh, a sharding or a function .*, found 'cpu'"),
    ],
)
def test_a_target_that_does_not_fit(directory, target, message):
    with pytest.raises(ost.TensorMismatchError, match=message):
        ost.load(directory, target)


def test_a_place_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ost.StorageError, match="cannot be made: .*/file: Not a directory"):
        ost.save(tmp_path / "file" / "saved", {"w": W})


def test_a_directory_that_orbax_cannot_make():
    """The kernel's own directories take no others, whoever asks."""
    with pytest.raises(ost.StorageError, match="^/proc/orbax_safetensors/model: cannot be (made|saved): "):
        ost.save("/proc/orbax_safetensors/model", {"a": np.zeros(3, np.float32)})


def test_a_sharding_that_does_not_fit(directory, line):
    with pytest.raises(ost.TensorMismatchError, match="step"):
        ost.load(directory, NamedSharding(line, P("d")))


def test_nothing_there(tmp_path):
    with pytest.raises(ost.MissingError):
        ost.load(tmp_path / "missing", lambda name, shape: None)
