"""What a caller may pass as `config=`, and what is said of what stands beside it."""

import re

import numpy as np
import pytest

import orbax_safetensors as ost


class ToyConfig:
    def to_dict(self):
        return {"model_type": "toy"}


class Toy:
    config = ToyConfig()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ToyConfig, "config: expected an instance, found the class ToyConfig: pass an instance of it"),
        (Toy(), "config: expected a config, found a Toy: pass model.config"),
    ],
    ids=["its class", "the model that has it"],
)
def test_what_is_not_a_config(tmp_path, config, message):
    with pytest.raises(ost.MappingError, match=f"^{re.escape(message)}$"):
        ost.save(tmp_path / "saved", {"w": np.ones(3)}, config=config)
    assert not (tmp_path / "saved").exists()


def test_a_misspelt_path(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    message = f"{tmp_path / 'confg.json'}: no such file or directory (nearest: {tmp_path / 'config.json'})"
    with pytest.raises(ost.MissingError, match=f"^{re.escape(message)}$"):
        ost.save(tmp_path / "saved", {"w": np.ones(3)}, config=tmp_path / "confg.json")
    assert not (tmp_path / "saved").exists()
