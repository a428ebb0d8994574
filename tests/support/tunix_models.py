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
from unittest import mock

import flax
import pytest
from flax import nnx


class TunixModel(NamedTuple):
    """A model of Tunix.

    Attributes:
      config: Tunix's config of it.
      table: its table of stored names.
      load: reads a directory, given a mesh.
      abstract: returns the parts of the abstract model, as `nnx.split` does.
    """

    config: Any
    table: dict[str, Any]
    load: Any
    abstract: Any


def tunix_model(kind: str, config: dict[str, Any]) -> TunixModel:
    """Return the model of Tunix that is for a config of `transformers`, as far as parameters and results go."""
    is_gemma = kind.startswith("gemma")
    module = "gemma" if kind == "gemma2" else kind
    params = import_tunix(f"tunix.models.{module}.{'params_safetensors' if is_gemma else 'params'}")
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
    if kind == "gemma3":
        sizes["global_base_frequency"] = 1_000_000
    if module == "gemma":
        sizes |= _first_gemmas(params.model_lib.AttentionType, config, post_norms=kind == "gemma2")
    elif kind == "gemma4":
        sizes |= _gemma4(params.model_lib.AttentionType, config)
    elif "num_experts" in config:
        sizes |= {key: config[key] for key in ("num_experts", "num_experts_per_tok")}
    cfg = params.model_lib.ModelConfig(**sizes)
    table = params._get_key_and_transform_mapping
    if kind == "gemma":
        table = _with_norms_of_gemma_1(table)

    def load(directory: Any, mesh: Any) -> Any:
        with mock.patch.object(params, "_get_key_and_transform_mapping", table):
            return params.create_model_from_safe_tensors(str(directory), cfg, mesh=mesh)

    def abstract() -> tuple[Any, Any]:
        return nnx.split(
            nnx.eval_shape(lambda: getattr(params.model_lib, module.title())(cfg, rngs=nnx.Rngs(params=0)))
        )

    return TunixModel(cfg, table(cfg), load, abstract)


def _first_gemmas(kinds: Any, config: dict[str, Any], *, post_norms: bool) -> dict[str, Any]:
    """Return what the config of Gemma 1 and 2 has besides; `post_norms` if it is Gemma 2."""
    pattern = [kinds.LOCAL_SLIDING, kinds.GLOBAL] if post_norms else [kinds.GLOBAL]
    return {
        "attention_types": pattern * config["num_hidden_layers"],
        "use_post_attn_norm": post_norms,
        "use_post_ffw_norm": post_norms,
        "attn_logits_soft_cap": 50.0 if post_norms else None,
        "final_logit_softcap": 30.0 if post_norms else None,
    }


def _with_norms_of_gemma_1(table: Any) -> Any:
    """Return the table of Gemma 2 for Gemma 1.

    Tunix has none for it: the second norm of a layer, which is before its MLP, is stored under the name that the norm
    after attention has in Gemma 2, and Tunix's loader finds no place for it.
    """

    def amended(cfg: Any) -> dict[str, Any]:
        return {
            pattern: ("layers.\\1.pre_ffw_norm.scale", None) if "post_attention_layernorm" in pattern else row
            for pattern, row in table(cfg).items()
            if "feedforward" not in pattern
        }

    return amended


def _gemma4(kinds: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return what the config of Gemma 4 has besides; a config with experts has an MLP beside them."""
    shared = config["num_kv_shared_layers"]
    sizes = {
        "hidden_dim": config["intermediate_size"],
        "global_key_size": config["global_head_dim"],
        "num_global_kv_heads": config.get("num_global_key_value_heads"),
        "k_eq_v_global": config["attention_k_eq_v"],
        "per_layer_input_dim": config["hidden_size_per_layer_input"],
        "frac_shared_layers": shared / config["num_hidden_layers"],
        "override_kv_shared_ffw_hidden": 2 * config["intermediate_size"] if shared else None,
        "attention_pattern": [
            kinds.GLOBAL if kind == "full_attention" else kinds.LOCAL_SLIDING for kind in config["layer_types"]
        ],
    }
    if config["enable_moe_block"]:
        sizes |= {
            "enable_moe": True,
            "num_experts": config["num_experts"],
            "num_experts_per_tok": config["top_k_experts"],
            "expert_dim": config["moe_intermediate_size"],
        }
    return sizes


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
