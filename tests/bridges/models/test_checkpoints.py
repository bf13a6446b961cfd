"""Parameters of transformers' models in la.layers: the same logits, and back to the same tensors."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from tests.bridges.models.tiny_models import build

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.23", reason="the extra `transformers`")

from linattn_np.bridges.checkpoints import from_transformers, to_transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
DENSE = {"mlp_only_layers": [0, 1]}
MODELS = {
    "mamba2": ("mamba2", {"n_groups": 1}),
    "mamba2 tied": ("mamba2", {"n_groups": 1, "tie_word_embeddings": True, "use_conv_bias": False}),
    "qwen3_next": ("qwen3_next", DENSE),
    "qwen3_next, one key head": ("qwen3_next", DENSE | {"linear_num_key_heads": 1, "num_key_value_heads": 2}),
}
models = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny operations: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drawn(name):
    """A model whose parameters are all away from their initial values."""
    model, options = MODELS[name]
    theirs = build(model, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in theirs.parameters():
            x += 0.1 * torch.randn(x.shape, generator=generator)
    return theirs


@models
def test_logits_are_theirs(name):
    theirs = drawn(name)
    model, params = from_transformers(theirs)
    ids = np.random.default_rng(0).integers(2, 61, (2, 37))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids), use_cache=False).logits.numpy()
    found = model.logits(params, ids)
    assert np.abs(expected).max() > 0.5
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    first, state = model.logits(params, ids[:, :20], return_state=True)
    second = model.logits(params, ids[:, 20:], state=state)
    assert np.abs(np.concatenate([first, second], axis=1) - found).max() < 1e-5 * np.abs(expected).max()


@models
def test_parameters_go_back(name):
    theirs, other = drawn(name), build(MODELS[name][0], **MODELS[name][1])
    _, params = from_transformers(theirs)
    to_transformers(params, other)
    for n, x in theirs.state_dict().items():
        assert torch.allclose(other.state_dict()[n], x, rtol=0, atol=1e-7), n


def test_what_the_layers_do_not_have_is_named():
    with pytest.raises(ValueError, match="layer 0 has 4 experts, expected dense layers"):
        from_transformers(build("qwen3_next"))
    with pytest.raises(ValueError, match="n_groups is 2, expected 1"):
        from_transformers(build("mamba2", n_groups=2))
    with pytest.raises(TypeError, match="the model is a Lfm2ForCausalLM, expected one of Mamba2ForCausalLM, Qwen3Next"):
        from_transformers(build("lfm2"))
    theirs = drawn("mamba2 tied")
    model, params = from_transformers(theirs)
    with pytest.raises(ValueError, match="params has no 'norm/weight'"):
        to_transformers({n: x for n, x in params.items() if n != "norm/weight"}, theirs)
    with pytest.raises(ValueError, match=r"lm_head.weight and backbone.embeddings.weight are one tensor"):
        to_transformers({**params, "head/weight": 2 * params["head/weight"]}, theirs)
    assert la.vjp(model.loss, params, np.array([[2, 3]]), np.array([[3, 4]]))[1](1.0).params.keys() == params.keys()
