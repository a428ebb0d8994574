"""The models of Tunix with the tables and loaders that come with them, of `google-tunix` without its dependencies.

`import tunix` imports its trainers and all that these need, 1.6 GB with a `safetensors` older than this project's. The
modules of the models need `einops`, and `jaxtyping`, which `equinox` brings along, so they are imported without the
package around them: `pip install --no-deps google-tunix einops`.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any, NamedTuple

import flax
import pytest


class TunixModel(NamedTuple):
    """A model of Tunix.

    Attributes:
      config: Tunix's config of it.
      table: its table of stored names.
      load: reads a directory, given a mesh.
    """

    config: Any
    table: dict[str, Any]
    load: Any


def tunix_model(kind: str, config: dict[str, Any]) -> TunixModel:
    """Return the model of Tunix that is for a config of `transformers`, as far as parameters go."""
    is_gemma = kind.startswith("gemma")
    params = import_tunix(f"tunix.models.{kind}.{'params_safetensors' if is_gemma else 'params'}")
    heads = config["num_attention_heads"]
    vocabulary = "num_embed" if is_gemma else "vocab_size"
    sizes: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        vocabulary: config["vocab_size"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config.get("moe_intermediate_size", config["intermediate_size"]),
        "num_heads": heads,
        "head_dim": config.get("head_dim", config["hidden_size"] // heads),
        "num_kv_heads": config["num_key_value_heads"],
    }
    if is_gemma:
        sizes["sliding_window_size"] = config["sliding_window"]
    else:
        sizes |= {"rope_theta": 10_000, "norm_eps": 1e-6}
        sizes["weight_tying" if kind == "llama3" else "use_tied_embedding"] = config["tie_word_embeddings"]
    if kind == "gemma4":
        sizes |= {
            "global_key_size": config["global_head_dim"],
            "num_global_kv_heads": config["num_global_key_value_heads"],
            "k_eq_v_global": config["attention_k_eq_v"],
        }
    if "num_experts" in config:
        sizes |= {key: config[key] for key in ("num_experts", "num_experts_per_tok")}
    cfg = params.model_lib.ModelConfig(**sizes)
    return TunixModel(
        cfg,
        params._get_key_and_transform_mapping(cfg),
        lambda directory, mesh: params.create_model_from_safe_tensors(str(directory), cfg, mesh=mesh),
    )


def import_tunix(name: str) -> Any:
    """Import a module of Tunix without `tunix/__init__.py`; skip the test if it is not installed."""
    if "tunix" not in sys.modules:
        spec = importlib.util.find_spec("tunix")
        if spec is None or spec.submodule_search_locations is None:
            pytest.skip(
                "google-tunix is not installed: pip install --no-deps google-tunix einops", allow_module_level=True
            )
        package = types.ModuleType("tunix")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["tunix"] = package
    with warnings.catch_warnings(), flax_as_it_was():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@contextlib.contextmanager
def flax_as_it_was():
    """Undo what happens to a setting of Flax, which Tunix changes for the whole process when it is imported."""
    name = "flax_always_shard_variable"
    before = getattr(flax.config, name, None)
    try:
        yield
    finally:
        if before is not None:
            flax.config.update(name, before)
