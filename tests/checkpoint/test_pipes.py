"""Named pipes in the place of files: no job waits for somebody to write into them."""

import os

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.format.layout import FILE_NAME, INDEX_NAME

JOBS = {
    "open": lambda source, to: ost.open_checkpoint(source),
    "load": lambda source, to: ost.load(source),
    "load with checksums": lambda source, to: ost.load(source, options=ost.SafetensorsOptions(checksums=True)),
    "verify": lambda source, to: ost.verify(source, data=True),
    "convert": lambda source, to: ost.convert(source, to, to="orbax"),
    "reshard": lambda source, to: ost.reshard(source, to),
    "metadata": lambda source, to: ost.SafetensorsCheckpointer().metadata(source),
}
ALL = {*JOBS}
REFUSING = {
    FILE_NAME: ALL,
    INDEX_NAME: ALL,
    "config.json": {"reshard"},
    CHECKSUMS_NAME: {"load with checksums", "verify"},
    "_CHECKPOINT_METADATA": {"metadata"},
}


@pytest.mark.parametrize("name", REFUSING)
def test_a_pipe_is_refused_where_it_would_be_read(name, tmp_path):
    source = tmp_path / "from"
    ost.save(source, {"a": np.arange(6)}, index=False)
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    for job, run in JOBS.items():
        faults = []
        try:
            found = run(source, tmp_path / job)
            faults += found if job == "verify" else []
        except ost.StorageError as error:
            faults.append(error)
        assert (f"{name}: is not a regular file" in str(faults)) == (job in REFUSING[name]), job
