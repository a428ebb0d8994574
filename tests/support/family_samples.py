"""Small models as `transformers` saved them, and as MaxText's own converter did (`testdata/maxtext`)."""

import json

import numpy as np
from safetensors.numpy import load_file

from orbax_safetensors.mapping.families.maxtext import FAMILIES
from tests.support.evaluate import binder
from tests.support.roots import TESTDATA

DATA = TESTDATA / "maxtext"
FAMILY = {family.name: family for family in FAMILIES}
SAMPLES = {
    "deepseek2": "deepseek2",
    "deepseek3": "deepseek3",
    "deepseek3.2": "deepseek3_2",
    "deepseek3_mtp": "deepseek3",
    "deepseek4": "deepseek4",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4_moe": "gemma4",
    "gemma4_small": "gemma4_small",
    "gpt-oss": "gpt_oss",
    "kimi-k2": "deepseek3",
    "llama2": "llama3",
    "llama3.1": "llama3",
    "llama4": "llama4",
    "llama4_dense": "llama4",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "olmo3": "olmo3",
    "qwen2.5": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3_moe",
    "qwen3.5": "qwen3_5",
    "qwen3_next": "qwen3_next",
    "qwen3_omni": "qwen3_omni",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
}
# MaxText stacks the layers of some models only.
TREES = [
    (name, mode) for name in SAMPLES for mode in ("scanned", "unscanned") if (DATA / name / f"mt_{mode}.npz").exists()
]

# One of each kind, where models do not matter: scanned, with experts, with interleaved weights, tied.
CHOSEN = [("deepseek3_mtp", "scanned"), ("gemma3", "scanned"), ("gpt-oss", "unscanned"), ("qwen3", "unscanned")]


def made_with(name, mode):
    """The switches of the tree that MaxText made. Its script for a scanned Llama 4 drops the tower."""
    without_tower = {"use_multimodal": False} if (SAMPLES[name], mode) == ("llama4", "scanned") else {}
    return {"scan_layers": mode == "scanned", **without_tower}


class Sample:
    """A small model as `transformers` saved it, and as MaxText's converter did.

    `files` are the stored tensors by their names there, `stored` by the names of the family.
    """

    def __init__(self, name):
        self.model = SAMPLES[name]
        self.family = FAMILY[f"maxtext.{self.model}"]
        self.directory = DATA / name
        self.config = json.loads((self.directory / "hf" / "config.json").read_text())
        self.files = {}
        for file in sorted((self.directory / "hf").glob("*.safetensors")):
            self.files |= load_file(file)
        names = self.family.renamed(self.files, self.config)
        self.stored = {names[name]: array for name, array in self.files.items()}
        self.name = name
        self.scanned = (name, "scanned") in TREES
        whole = self.config.get("thinker_config", self.config)
        self.vocab_size = whole.get("text_config", whole)["vocab_size"]
        # Each has the config of multi-token prediction, and one the tensors.
        self.mtp = name == "deepseek3_mtp"

    def describe_made(self, scan_layers):
        return self.describe(**made_with(self.name, "scanned" if scan_layers else "unscanned"))

    @property
    def shapes(self):
        """The shapes of the stored tensors."""
        return {name: array.shape for name, array in self.stored.items()}

    def describe(self, **variant):
        if self.model.startswith("deepseek3"):
            variant = {"mtp": self.mtp, **variant}
        return self.family.describe(self.config, variant, binder(self.stored))

    def made_by_maxtext(self, scan_layers):
        with np.load(self.directory / ("mt_scanned.npz" if scan_layers else "mt_unscanned.npz")) as arrays:
            return {name.replace("-", "."): arrays[name] for name in arrays}
