"""A disk that cannot read a part of a file: an error that names the file."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support.disks import broken_file
from tests.support.files import write
from tests.support.roots import ROOT

pytestmark = pytest.mark.process

PROGRAM = """
import sys
import jax
import orbax_safetensors as ost
from tests.support.accelerator import accelerator

sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
options = ost.SafetensorsOptions(in_flight_bytes=2**15)
for number in range(3):  # the page cache also has pages that could not be read
    try:
        with accelerator():
            ost.load(sys.argv[1], sharding, options=options)
    except ost.StorageError as error:
        print(error)
"""


def test_each_restore_says_what_cannot_be_read(tmp_path):
    write(tmp_path / "whole", {f"w{number:02}": np.ones(2**12, np.float32) for number in range(64)})
    with broken_file(tmp_path / "disk", (tmp_path / "whole").read_bytes()) as path:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, path],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )
    assert done.returncode == 0, done.stderr
    errors = done.stdout.splitlines()
    assert len(errors) == 3
    for error in errors:
        assert error.startswith(f"{path}: reading ")
        assert error.endswith(" failed: Input/output error")
