"""Settings of JAX: what a caller has chosen for programs of its own does not count for those of this package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

# Checks of numbers fail for weights that hold a NaN, and switch donations off.
_SWITCHES: dict[str, Any] = {
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_disable_jit": jax.disable_jit,
    "jax_no_tracing": jax.no_tracing,
}


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Compile and run programs, in this thread, as if nobody had set anything.

    `arrays.explicit_transfers` and `sharding.no_mesh` do the same for what they say.
    """
    with contextlib.ExitStack() as stack:
        for name, switch in _SWITCHES.items():
            if getattr(jax.config, name):
                stack.enter_context(switch(False))
        yield
