"""Eight simulated CPU devices, and what tests of all rooms use. Tiers of tests are in `tests/support/tiers.py`."""

import gc
import os
import signal

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
# Otherwise huggingface_hub asks the public Hub for something that goes into its name.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import jax
import numpy as np
import pytest

from tests.support import hang

# Object stores on this machine.
pytest_plugins = ["tests.support.servers.fixtures", "tests.support.tiers", "tests.support.both_devices"]

jax.config.update("jax_numpy_dtype_promotion", "strict")
# A shell lets what it starts in the background ignore interrupts, and so would what the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Hand the one number for all waits to this process, and to those that tests start."""
    hang.SECONDS = float(config.getini("faulthandler_timeout")) or hang.SECONDS
    os.environ[hang.VARIABLE] = str(hang.SECONDS)


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    """Eight devices as a 2 x 4 mesh with the axes `x` and `y`."""
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))


@pytest.fixture
def young():
    """Nothing that the test makes grows old: `gc.collect(0)` finds it, without a look through all that there is."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def accelerators(monkeypatch):
    """All devices are accelerators to the package. Like those, CPU devices have memory of the kind `pinned_host`."""
    monkeypatch.setattr("orbax_safetensors.devices.arrays.is_cpu", lambda device: False)


@pytest.fixture
def scalars():
    """The latest of each scalar that is reported to `jax.monitoring` during the test, by name."""
    found = {}

    def listen(name, value, **_):
        found[name] = value

    jax.monitoring.register_scalar_listener(listen)
    yield found
    jax.monitoring.unregister_scalar_listener(listen)
