"""A small checkpoint, a checkpointer with the handler, and a mesh of one axis."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

import orbax_safetensors as ost
from tests.support.files import write_indexed
from tests.support.small_model import STEP, B, W


@pytest.fixture
def directory(tmp_path):
    write_indexed(tmp_path, [{"layer.w": W}, {"layer.b": B, "step": STEP}])
    return tmp_path


@pytest.fixture
def checkpointer():
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        yield checkpointer


@pytest.fixture
def line():
    """Eight devices as a mesh of one axis."""
    return Mesh(np.array(jax.devices()), ("d",))
