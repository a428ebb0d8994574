"""`diff`: what it prints, and its exit status, for checkpoints of every kind."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import orbax_safetensors as ost
from tests.support.roots import TESTDATA

QWEN3 = TESTDATA / "maxtext" / "qwen3" / "hf"


@pytest.fixture
def changed(tmp_path, parts):
    tensors = {name: array.copy() for name, array in (parts[0] | parts[1]).items()}
    tensors["layer.0.kernel"][3, 4] += 2
    tensors["layer.0.bias"] = tensors["layer.0.bias"].astype(np.float64)
    tensors["odd"] = tensors["odd"][:12]
    tensors["added"] = tensors.pop("steps")
    save_file(tensors, tmp_path / "changed.safetensors")
    return tmp_path / "changed.safetensors"


def test_the_same_arrays_in_other_files(cli, single, directory):
    result = cli("diff", single, directory)
    assert result.status == 0
    assert result.facts == {
        "A": str(single),
        "B": str(directory),
        "equal arrays": "5",
        "different arrays": "0",
        "only in A": "0",
        "only in B": "0",
    }


def test_each_kind_of_difference_has_a_table(cli, single, changed):
    result = cli("diff", single, changed)
    assert result.status == 1
    assert result.blocks[:4] == [
        [["only in A"], ["steps"]],
        [["only in B"], ["added"]],
        [["different shapes", "in A", "in B"], ["odd", "[13]", "[12]"]],
        [
            ["different values", "dtype", "changed", "elements", "largest difference"],
            ["layer.0.kernel", "float32", "1", "3072", "2"],
            ["layer.0.bias", "float32 and float64", "0", "48", "0"],
        ],
    ]


def test_json(cli, single, changed):
    found = json.loads(cli("diff", single, changed, "--json").out)
    kernel = {
        "name": "layer.0.kernel",
        "shapes": [[64, 48], [64, 48]],
        "dtypes": ["float32", "float32"],
        "elements": 3072,
        "changed": 1,
        "largest_difference": pytest.approx(2, abs=1e-6),
    }
    assert (found["paths"], found["same"], found["equal"]) == ([str(single), str(changed)], False, 1)
    assert found["only"] == [["steps"], ["added"]]
    assert kernel in found["different"]
    odd = next(array for array in found["different"] if array["name"] == "odd")
    assert (odd["changed"], odd["largest_difference"]) == (None, None)


def test_json_has_no_infinity(cli, tmp_path):
    for file, value in (("a", 1), ("b", np.inf)):
        save_file({"x": np.array([value], np.float32)}, tmp_path / f"{file}.safetensors")
    (array,) = json.loads(cli("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json").out)[
        "different"
    ]
    assert (array["changed"], array["largest_difference"]) == (1, None)


def test_a_link_a_conversion_and_their_source(cli, tmp_path):
    ost.link(QWEN3, tmp_path / "link", family="maxtext")
    ost.convert(QWEN3, tmp_path / "orbax", to="orbax", family="maxtext")
    assert cli("diff", QWEN3, tmp_path / "link").status == 0
    assert cli("diff", tmp_path / "link", tmp_path / "orbax").status == 0
    assert cli("diff", tmp_path / "orbax", tmp_path / "orbax").status == 0
    result = cli("diff", QWEN3, tmp_path / "orbax", "--family", "maxtext")
    assert (result.status, result.blocks[0]) == (1, [["only in B"], ["step"]])  # of MaxText's training state
    result = cli("diff", tmp_path / "orbax", tmp_path / "orbax", "--family", "maxtext")
    assert (result.status, result.out) == (2, "")
    assert "--family is for safetensors, and A and B are checkpoints of Orbax" in result.err


def test_quantised_tensors_against_plain_ones(cli, tmp_path):
    tensors = {name: array for file in QWEN3.glob("*.safetensors") for name, array in load_file(file).items()}
    plain = tmp_path / "plain"
    ost.save(plain, tensors, like=QWEN3)
    assert cli("diff", QWEN3, plain, "--family", "dequantized").status == 0
