"""The model on the first pages computes what `transformers` does with the same files."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import examples
from tests.support.roots import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = np.arange(12)


def expected(directory):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(("page", "name"), [("README.md", "params"), ("docs/quickstart.md", "tuned")])
def test_the_logits_of_a_page(tmp_path, page, name):
    examples.make_models(tmp_path)
    names = {}
    for block in examples.python(ROOT / page):
        examples.run(block, tmp_path, names)
    logits = names["logits"](names[name], jnp.asarray(TOKENS))
    np.testing.assert_allclose(logits, expected(tmp_path / "tuned"), rtol=1e-4, atol=1e-6)
