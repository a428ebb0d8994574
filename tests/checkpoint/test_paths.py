"""Checkpoints at paths with characters that mean something to somebody: each is a name, or is refused at once."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import orbax_safetensors as ost
from orbax_safetensors.cli.main import main
from orbax_safetensors.orbax_store import directories
from orbax_safetensors.orbax_store.discovery import UNFINISHED
from tests.support.compare import assert_same_arrays
from tests.support.files import random_bits

RNG = np.random.default_rng(0)
TREE = {
    "layer": {"kernel": random_bits(RNG, (8, 6), np.dtype(ml_dtypes.bfloat16))},
    "bias": random_bits(RNG, (12,), np.dtype(np.int32)),
}
MESH = {"mesh": {"x": 2}, "spec": {"kernel": ("x",)}}

NAMES = [
    "runs[1]",
    "[!r]",
    "[",
    "runs*",
    "run?",
    "{a,b}",
    "a%20b%2Fc",
    "a#b",
    "a b ",
    "line\nbreak\t",
    "ünïcødé 模型",
    "a\u0308",
    "-a",
    "~a~",
    ".a",
    "$HOME",
    "a:b",
    "http:",
    "a'\"b",
    "a&b;c|d=@",
]

# Those that Orbax or what it uses takes for something else.
REFUSED = ["back\\slash", "**", "gs:", "caf\udce9", "5.orbax-checkpoint-tmp"]

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def same(tree):
    assert_same_arrays(tree, TREE)


def ours(path):
    return ocp.Checkpointer(ost.SafetensorsHandler()).restore(path)


def stock(path):
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path / "0" / "items")


def everything(root):
    return sorted(os.path.join(at, name) for at, *names in os.walk(root) for name in (*names[0], *names[1]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The tree as safetensors and as a checkpoint of Orbax, at paths that mean nothing else."""
    root = tmp_path_factory.mktemp("saved")
    ocp.Checkpointer(ost.SafetensorsHandler()).save(root / "st", TREE)
    ost.convert(root / "st", root / "orbax", to="orbax")
    return root


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_directory(tmp_path, name):
    root = tmp_path / name
    ocp.Checkpointer(ost.SafetensorsHandler()).save(root / "st", TREE)
    same(ours(root / "st"))
    assert ost.verify(root / "st") == []
    ost.convert(root / "st", root / "orbax", to="orbax")
    same(stock(root / "orbax"))
    ost.convert(root / "orbax", root / "back", to="safetensors")
    same(ours(root / "back"))
    ost.reshard(root / "orbax", root / "orbax for 2", **MESH)
    same(stock(root / "orbax for 2"))
    ost.reshard(root / "st", root / "st for 2", **MESH)
    same(ours(root / "st for 2"))
    assert main(["inspect", os.fspath(root / "st")]) == 0
    assert main(["verify", os.fspath(root / "back")]) == 0


@pytest.mark.parametrize("name", ["runs*", "run[sx]*", "run?*"])
def test_no_other_directory_is_merged(saved, tmp_path, name):
    """If `name` is taken for a pattern, it matches another checkpoint, which has an array more."""
    more = {**TREE, "more": np.arange(5, dtype=np.int8)}
    ocp.Checkpointer(ost.SafetensorsHandler()).save(tmp_path / "st", more)
    ost.convert(tmp_path / "st", tmp_path / "runs 1", to="orbax")
    # As an unfinished item, in whose directory Orbax merges.
    step = tmp_path / "runs 1" / "0"
    (step / "items").rename(step / f"items{UNFINISHED}")
    step.rename(step.with_name(f"0{UNFINISHED}"))
    ost.convert(saved / "st", tmp_path / name, to="orbax")
    same(stock(tmp_path / name))
    item = os.fspath(tmp_path / name / "0" / "items")
    context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
    assert not [
        key for key in directories.kvstore(item, context, ocdbt=True).list().result() if key.startswith(b"more")
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_orbax_does_not_take_for_names(saved, tmp_path, name):
    root = tmp_path / name
    for make in (
        lambda: ost.convert(saved / "st", root / "to", to="orbax"),
        lambda: ost.reshard(saved / "orbax", root / "to", **MESH),
    ):
        with pytest.raises(ost.StorageError, match="Orbax|unfinished"):
            make()
    assert everything(tmp_path) == []


@pytest.mark.parametrize("name", ["back\\slash", "**", "gs:", "caf\udce9"])
def test_names_of_sources_that_orbax_does_not_take_for_names(saved, tmp_path, name):
    os.symlink(saved, tmp_path / name)
    with pytest.raises(ost.StorageError, match="cannot hold a checkpoint of Orbax"):
        ost.convert(tmp_path / name / "orbax", tmp_path / "to", to="safetensors")
    assert everything(tmp_path) == [os.fspath(tmp_path / name)]
    # Files are reached without Orbax's libraries.
    same(ost.SafetensorsHandler().restore(epath.Path(tmp_path / name / "st"), ost.SafetensorsRestore(TREE)))
    ost.reshard(tmp_path / name / "st", tmp_path / "to", **MESH)
    same(ours(tmp_path / "to"))


LOADS = {
    "load": ost.load,
    "open": lambda path: dict.fromkeys(ost.open_checkpoint(path).leaves),
    "checkpointer": lambda path: ost.SafetensorsCheckpointer().restore(path),
    "handler": lambda path: ost.SafetensorsHandler().restore(path),
    "converted": lambda path: stock(Path(ost.convert(path, "converted", to="orbax").path).parents[1]),
    "resharded": lambda path: ost.load(ost.reshard(path, "resharded").path),
    "linked": lambda path: ocp.PyTreeCheckpointer().restore(ost.link(path, "linked").path),
    "planned": lambda path: {array.name: None for array in ost.plan_link(path, "planned").arrays},
}


@pytest.fixture
def linked(tmp_path, monkeypatch):
    """A working directory with `link`, which leads to `other/deep`: to the kernel, `link/..` is `other`."""
    os.makedirs(tmp_path / "other" / "deep")
    os.makedirs(tmp_path / "here")
    os.symlink(tmp_path / "other" / "deep", tmp_path / "here" / "link")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_every_job_reads_behind_links_what_the_kernel_reads(linked):
    ost.save(linked / "here" / "m", {"wrong": np.ones(3)}, index=False)
    ost.save(linked / "other" / "m", {"right": np.ones(3)}, index=False)
    for job, load in LOADS.items():
        assert list(load("link/../m")) == ["right"], job


def test_orbax_checkpoints_are_found_behind_links(linked):
    ost.save(linked / "other" / "st", TREE)
    ost.convert(linked / "other" / "st", linked / "other" / "m", to="orbax")
    assert ost.verify("link/../m") == []
    assert main(["inspect", "link/../m"]) == main(["verify", "link/../m"]) == 0
    assert main(["plan", "link/../m", "--mesh", "x=2", "--spec", ".=x"]) == 0
    same(stock(Path(ost.reshard("link/../m", "again", **MESH).path).parents[1]))


SAVES = {
    "save": lambda path: ost.save(path, TREE),
    "force": lambda path: ost.save(path, TREE, force=True),
    "checkpointer": lambda path: ost.SafetensorsCheckpointer().save(path, TREE),
    "convert": lambda path: ost.convert("../source", path, to="safetensors"),
    "reshard": lambda path: ost.reshard("../source", path),
    "link": lambda path: ost.link("../source", path),
}


@pytest.mark.parametrize("save", list(SAVES))
def test_every_job_writes_behind_links_where_the_kernel_writes(save, linked):
    ost.save(linked / "source", TREE, index=False)
    if save == "convert":
        ost.convert(linked / "source", linked / "orbax", to="orbax")
        os.rename(linked / "source", linked / "safetensors")
        os.rename(linked / "orbax", linked / "source")
    (linked / "here" / "m").mkdir()
    (linked / "here" / "m" / "precious").touch()
    SAVES[save]("link/../m")
    assert os.listdir(linked / "here" / "m") == ["precious"]
    same(ours(linked / "other" / "m"))


def test_a_link_as_a_destination_is_not_followed(linked):
    for save in SAVES.keys() - {"force"}:
        with pytest.raises((OSError, ValueError), match="link"):
            SAVES[save]("../here/link")
    assert os.listdir(linked / "other" / "deep") == []
    assert os.path.islink(linked / "here" / "link")


def test_the_home_directory(linked, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(linked / "other"))
    ost.save("~/m", TREE)
    assert sorted(os.listdir(linked / "other")) == ["deep", "m"]
    same(ost.load("~/m"))
    assert ost.verify("~/m") == []
    ost.convert("~/m", "~/orbax", to="orbax")
    assert main(["verify", "~/orbax"]) == main(["inspect", "~/m"]) == 0
    assert main(["plan", "~/m", "--mesh", "x=1", "--picture", "~/plan.html"]) == 0
    assert (linked / "other" / "plan.html").stat().st_size
    ost.save("~/like", TREE, like="~/m")
    assert os.listdir(linked / "here") == ["link"]


def test_a_save_whose_path_is_no_text(tmp_path):
    """Orbax writes the path into a file, when all else is written."""
    with pytest.raises(ost.StorageError, match="not UTF-8"):
        ocp.Checkpointer(ost.SafetensorsHandler()).save(tmp_path / "caf\udce9", TREE)
    assert not [path for path in everything(tmp_path) if path.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("a#b", "'gs://bucket/a'"),
        ("a[1]", "a pattern"),
        ("a*", "a pattern"),
        ("a?", "a pattern"),
        ("a\nb", "'gs://bucket/ab"),
    ],
)
def test_names_of_objects_that_orbax_does_not_take_for_names(saved, name, meaning):
    with pytest.raises(ost.StorageError, match=meaning):
        ost.convert(saved / "st", f"gs://bucket/{name}", to="orbax")
