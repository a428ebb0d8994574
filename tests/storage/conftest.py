"""The Hub, as somebody without credentials finds it."""

import pytest
from huggingface_hub import constants

from orbax_safetensors.storage import retries
from orbax_safetensors.storage.schemes import store_of
from tests.support.hub_files import FILES


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """No credentials, and what is tried again is tried again at once."""
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setattr(retries, "FIRST_WAIT", 0.01)


@pytest.fixture
def commit(hub, monkeypatch) -> str:
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    return hub.commit(FILES)


@pytest.fixture
def opened(hub, commit):
    """Opens a file of the repository."""

    def run(name="model.safetensors", **options):
        store, path = store_of(f"{hub.url}/{name}", options)
        return store.open(path)

    return run
