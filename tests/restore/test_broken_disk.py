"""A disk that cannot read a part of a file: an error that names the file, for mapped files as for others."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support.disks import broken_file
from tests.support.files import write
from tests.support.roots import ROOT

pytestmark = pytest.mark.process

# In a process of its own, which a `SIGBUS` would end.
PROGRAM = """
import sys
import orbax_safetensors as ost
from tests.support.accelerator import accelerator

for number in range(3):  # the pages that could not be read stay in the page cache
    try:
        with accelerator():
            ost.load(sys.argv[1], options=ost.SafetensorsOptions(map_files=sys.argv[2] == "True"))
    except ost.StorageError as error:
        print(error)
"""


@pytest.mark.parametrize("map_files", [True, False])
def test_each_restore_says_what_cannot_be_read(tmp_path, map_files):
    write(tmp_path / "whole", {f"w{number}": np.ones(2**20, np.float32) for number in range(8)})
    with broken_file(tmp_path / "disk", (tmp_path / "whole").read_bytes()) as path:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, path, str(map_files)],
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
