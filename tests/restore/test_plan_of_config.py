"""Plans of models that are not there yet, from `config.json` alone, against the plans of their files."""

import json
import shutil

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.from_config import config_directory
from orbax_safetensors.errors import MissingError
from orbax_safetensors.mapping import Family, stored_shapes, tensor
from tests.support import full_size
from tests.support.family_samples import CHOSEN, DATA, made_with

MESH = AbstractMesh((2, 4), ("x", "y"))
# `transformers` drops the layers of multi-token prediction, which the config has.
WITHOUT_MTP = {"deepseek3": {"mtp": False}}
QWEN3 = DATA / "qwen3" / "hf" / "config.json"


def leading(name, shape):
    return NamedSharding(MESH, P("x") if shape and shape[0] % 2 == 0 else P())


def planned(path, **arguments):
    return ost.plan_restore(path, leading, **{"family": "maxtext", "process_count": 2, **arguments})


def assert_alike(found, expected):
    """All that does not follow from how tensors are dealt to files."""
    for figure in ("total_params", "total_bytes", "largest_shard", "smallest_shard"):
        assert getattr(found, figure) == getattr(expected, figure), figure
    for process, other in zip(found.processes, expected.processes, strict=True):
        assert process.needed_bytes == other.needed_bytes
        assert process.destination_bytes == other.destination_bytes


@pytest.fixture
def copied(tmp_path):
    def copy(config, **changed):
        content = {**json.loads(config.read_text()), **changed}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return tmp_path

    return copy


@pytest.mark.parametrize(("sample", "mode"), [*CHOSEN, ("deepseek3", "scanned")])
def test_it_is_the_plan_of_the_files(sample, mode, copied):
    files = DATA / sample / "hf"
    variant = {**made_with(sample, mode), **WITHOUT_MTP.get(sample, {})}
    alone = copied(files / "config.json", dtype="float32")  # one config has none
    assert_alike(planned(alone, variant=variant), planned(files, variant=variant))


@pytest.mark.full_size
@pytest.mark.parametrize("model", ["gpt-oss-120b-mxfp4", "qwen3-30b-a3b"])
def test_it_is_the_plan_of_full_size_models(model, copied, tmp_path_factory):
    files = full_size.make(model, tmp_path_factory.mktemp("files"))
    alone = copied(full_size.GEOMETRY / f"{model}.config.json")
    assert_alike(planned(alone), planned(files))


@pytest.mark.parametrize("family", ["maxtext", "tunix"])
def test_the_path_of_a_config_counts_too(family, tmp_path):
    """Also if there are files beside it."""
    shutil.copytree(QWEN3.parent, tmp_path / "files")
    shutil.copytree(QWEN3.parent, tmp_path / "alone", ignore=shutil.ignore_patterns("*.safetensors*"))
    plans = [
        planned(path, family=family)
        for path in (tmp_path / "alone", tmp_path / "alone" / "config.json", tmp_path / "files" / "config.json")
    ]
    assert plans[0].to_json() == plans[1].to_json()
    assert_alike(plans[2], planned(tmp_path / "files", family=family))


def test_the_target_decides_on_switches(copied):
    expected = ost.load(QWEN3.parent, family="maxtext", variant={"scan_layers": False})
    item = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leading("", leaf.shape)), expected
    )
    found = ost.plan_restore(copied(QWEN3), item, family="maxtext")
    assert found.total_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(expected))


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_that_of_the_config(key, dtype, size, copied):
    plan = planned(copied(QWEN3, **{"dtype": None, key: dtype}))
    assert plan.total_bytes == size * plan.total_params


def test_a_registered_family_plans_too(copied):
    ost.register("maxtext")
    try:
        assert planned(copied(QWEN3), family=None).to_json() == planned(copied(QWEN3)).to_json()
    finally:
        ost.unregister()


def test_codes_and_scales_are_planned(copied):
    config = json.loads((full_size.GEOMETRY / "gpt-oss-20b-mxfp4.config.json").read_text())["quantization_config"]
    plain = planned(copied(DATA / "gpt-oss" / "hf" / "config.json", hidden_size=64, intermediate_size=32))
    plan = planned(
        copied(
            DATA / "gpt-oss" / "hf" / "config.json", hidden_size=64, intermediate_size=32, quantization_config=config
        )
    )
    assert plan.total_params == plain.total_params
    assert plan.processes[0].needed_bytes < plain.processes[0].needed_bytes / 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": None}, "has no dtype or torch_dtype, so a plan needs the files"),
        ({"dtype": "float7"}, "expected dtype bfloat16, float16, float32, float64, found 'float7'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config 'fp8' does not name the quantised"),
        ({"architectures": ["Other"], "model_type": "other"}, "no family is for architecture Other"),
        ({"hidden_size": 0}, "has no elements"),
    ],
)
def test_a_config_that_does_not_say_enough(changed, message, copied):
    with pytest.raises(ost.MappingError, match=f"config.json: .*{message}"):
        planned(copied(QWEN3, **changed))


def test_a_family_of_what_is_stored_needs_files(copied):
    family = Family(
        "mine.any", (), lambda config: {name: tensor(name, shape) for name, shape in stored_shapes().items()}
    )
    with pytest.raises(ost.MappingError, match=r"config.json: mine.any: the tree follows from .* stored tensors"):
        planned(copied(QWEN3), family=family)


def test_without_a_family_files_are_needed(copied):
    with pytest.raises(
        MissingError, match="holds no .safetensors file; a plan of its config.json alone needs a family"
    ):
        planned(copied(QWEN3), family=None)


def test_a_restore_still_needs_files(copied):
    with pytest.raises(MissingError, match="holds no .safetensors file"):
        ost.load(copied(QWEN3), family="maxtext")


def test_an_orbax_checkpoint_with_a_config_is_one_of_orbax(tmp_path):
    ost.convert(QWEN3.parent, tmp_path / "orbax", to="orbax", family="maxtext")
    shutil.copy(QWEN3, tmp_path / "orbax")
    assert config_directory(tmp_path / "orbax") is None
    assert config_directory(tmp_path / "nothing") is None
