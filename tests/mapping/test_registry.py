"""Names of families that there are not: what the error suggests."""

import pytest

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import registry


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("maxtext.qwen3_", "'maxtext.qwen3_5', 'maxtext.qwen3', 'maxtext.qwen3_vl'"),
        ("lama", "'maxtext.llama4', 'maxtext.llama3', 'tunix.llama3'"),
        ("Qwen2.5", "'maxtext.qwen2_5', 'tunix.qwen2'"),
        ("tunix.llama", "'tunix.llama3'"),
        ("MaxText", "'maxtext'"),
        ("flax.path", "'flax.paths'"),
    ],
)
def test_a_misspelt_name(name, nearest):
    with pytest.raises(MappingError) as error:
        registry.find(name, {})
    assert str(error.value) == f"there is no family {name!r} (nearest: {nearest})"


def test_the_name_of_a_model_alone():
    with pytest.raises(MappingError, match=r"'qwen3' \(nearest: 'maxtext.qwen3', 'tunix.qwen3'\)$"):
        registry.find("qwen3", {})


def test_a_name_that_is_near_none_names_a_few():
    with pytest.raises(
        MappingError, match=r"'bert'; there are dequantized, flax, maxtext, tunix; `orbax-safetensors families` l"
    ):
        registry.find("bert", {})
