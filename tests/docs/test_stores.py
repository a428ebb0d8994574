"""The page on stores: its examples run with a store and a Hub on this machine."""

import numpy as np
import obstore

from tests.support import examples
from tests.support.roots import ROOT

PAGE = ROOT / "docs" / "stores.md"


def test_the_examples(tmp_path, hub, gcs, monkeypatch):
    models = examples.make_models(tmp_path)
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    hub.hub.commit("Qwen/Qwen3-0.6B", {path.name: path.read_bytes() for path in (tmp_path / "qwen3").iterdir()})
    for path in (tmp_path / "llama").iterdir():
        obstore.put(gcs.store(), f"llama/{path.name}", path.read_bytes())
    of_a_bucket, of_the_hub = examples.python(PAGE)
    names = {}
    of_a_bucket = of_a_bucket.replace('{"service_account": "/keys/models.json"}', repr(gcs.options))
    examples.run(of_a_bucket.replace("gs://bucket", gcs.url), tmp_path, names)
    for name, array in models["llama"].items():
        assert np.asarray(names["params"][name]).tobytes() == array.tobytes()
    assert "new/commit_success.txt" in {one["path"] for one in obstore.list(gcs.store()).collect()}
    examples.run(of_the_hub, tmp_path, names)
    assert names["params"]["params"]["decoder"]["layers"]["mlp"]["wi_0"]["kernel"].shape == (32, 3, 48)
