"""Conversions whose credentials are passed rather than in the environment, over a server that asks for them."""

import json
from functools import partial

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.convert.convert_request import ReshardRequest
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import read_small, write_small
from tests.support.files import random_bits, write_indexed

ARRAYS = {f"w{number}": random_bits(np.random.default_rng(number), (16, 64), np.dtype("f4")) for number in range(4)}


@pytest.fixture
def options(gcs):
    return ost.SafetensorsOptions(storage_options=gcs.options)


@pytest.fixture
def source(gcs, options, tmp_path):
    """The URL of a model, which is in `tmp_path / "from"` as well."""
    (tmp_path / "from").mkdir()
    write_indexed(tmp_path / "from", [dict(list(ARRAYS.items())[:2]), dict(list(ARRAYS.items())[2:])])
    (tmp_path / "from" / "config.json").write_text('{"model_type": "mine"}')
    store, path = store_of(f"{gcs.url}/from", options.storage_options)
    for file in (tmp_path / "from").iterdir():
        write_small(store, f"{path}/{file.name}", file.read_bytes())
    return f"{gcs.url}/from"


def content(url, options):
    store, path = store_of(url, options.storage_options)
    return {name: read_small(store.open(f"{path}/{name}"), 1 << 30) for name in store.list(path) or ()}


def test_reshard_from_a_url_to_a_url(source, gcs, options, tmp_path):
    ost.reshard(tmp_path / "from", tmp_path / "to", max_file_bytes=5000)
    asked = {"max_file_bytes": 5000, "options": options}
    ost.reshard(source, f"{gcs.url}/to", **asked)
    made = content(f"{gcs.url}/to", options)
    assert made == {path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()}
    assert "config.json" in made


def test_convert_from_a_url_and_back_to_one(source, gcs, options, tmp_path):
    ost.convert(source, tmp_path / "orbax", to="orbax", options=options)
    ost.convert(tmp_path / "orbax", f"{gcs.url}/back", to="safetensors", config=source, options=options)
    assert json.loads(content(f"{gcs.url}/back", options)["config.json"]) == {"model_type": "mine", "dtype": "float32"}
    back = ost.SafetensorsHandler(options=options).restore(f"{gcs.url}/back")
    assert all(back[name].tobytes() == array.tobytes() for name, array in ARRAYS.items())


@pytest.mark.parametrize("other", ["s3://bucket/to", "az://container/to"])
def test_options_do_not_go_to_another_store(other, gcs, options, tmp_path):
    to_files = partial(ost.convert, tmp_path, to="safetensors", config=f"{gcs.url}/from")
    for call in (partial(ost.reshard, f"{gcs.url}/from"), to_files):
        with pytest.raises(ost.SafetensorsError, match="storage_options are for one store") as error:
            call(other, options=options)
        assert other in str(error.value)
    assert gcs.server.log == []


def test_a_request_shows_no_secret(options):
    request = ReshardRequest(
        source="gs://bucket/from",
        destination="/to",
        mesh=None,
        spec=None,
        like=None,
        max_file_bytes=1,
        compression=True,
        memory_bytes=4,
        options=options,
    )
    secret = options.storage_options["google_bearer_token"]
    assert secret not in repr(request)
    assert secret not in request.facts
