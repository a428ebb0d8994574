"""The page on stores: its examples run with a store and a Hub on this machine."""

import numpy as np
import obstore

from tests.support import examples
from tests.support.roots import ROOT

PAGE = ROOT / "docs" / "stores.md"


def test_the_examples(tmp_path, hub, gcs, s3, monkeypatch, capsys):
    models = examples.make_models(tmp_path)
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    hub.hub.commit("Qwen/Qwen3-0.6B", {path.name: path.read_bytes() for path in (tmp_path / "qwen3").iterdir()})
    for path in (tmp_path / "llama").iterdir():
        obstore.put(gcs.store(), f"llama/{path.name}", path.read_bytes())
    of_a_bucket, of_the_hub, of_a_server = examples.python(PAGE)
    names = {}
    of_a_bucket = of_a_bucket.replace('{"service_account": "/keys/models.json"}', repr(gcs.options))
    examples.run(of_a_bucket.replace("gs://bucket", gcs.url), tmp_path, names)
    for name, array in models["llama"].items():
        assert np.asarray(names["params"][name]).tobytes() == array.tobytes()
    assert "new/commit_success.txt" in {one["path"] for one in obstore.list(gcs.store()).collect()}
    examples.run(of_the_hub, tmp_path, names)
    assert names["params"]["params"]["decoder"]["layers"]["mlp"]["wi_0"]["kernel"].shape == (32, 3, 48)

    for path in (tmp_path / "llama").iterdir():
        obstore.put(s3.store(), f"llama/{path.name}", path.read_bytes())
    shown = {
        "aws_endpoint_url": "http://127.0.0.1:9000",
        "aws_access_key_id": "KEY",
        "aws_secret_access_key": "SECRET",
    }
    for name, value in shown.items():
        of_a_server = of_a_server.replace(f'"{value}"', repr(s3.options[name]))
    examples.run(of_a_server.replace("s3://bucket", s3.url), tmp_path, names)
    assert names["params"].keys() == models["llama"].keys()

    (commands,) = examples.blocks(PAGE, "sh")
    export, command = commands.text.splitlines()
    assert export == f"export {' '.join(f'{name.upper()}={value}' for name, value in shown.items())}"
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    examples.run(examples.Block("sh", command.replace("s3://bucket", s3.url)), tmp_path, names)
    assert "model.embed_tokens.weight" in capsys.readouterr().out
