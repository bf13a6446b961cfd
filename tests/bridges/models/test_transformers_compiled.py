"""torch.compile of transformers' models on linattn_np: one graph, the numbers of the model that is not compiled."""

from __future__ import annotations

import pytest

from tests.bridges.models.tiny_models import MODELS, build

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23", reason="the extra `transformers`")

from linattn_np.bridges.transformers import patch_transformers, unpatch_transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
EPS = 2.0**-23


@pytest.fixture(autouse=True)
def _patched():
    transformers.utils.logging.set_verbosity_error()
    torch.compiler.reset()
    patch_transformers()
    yield
    unpatch_transformers()
    torch.compiler.reset()


LAYERS = {"qwen4_exp": {"layer_types": ["linear_attention"] * 2}}  # its indexed layers are no graph without the patch
LARGE = ("glm5_next", "lfm2_moe", "qwen3_5_moe", "qwen4_exp")  # compiled in many seconds


def model_of(name):
    """A tiny model; experts in a form without a loop over the experts that were hit, which no compiler can trace."""
    model = build(name, **LAYERS.get(name, {}))
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    return model


def tokens(*shape):
    return torch.randint(2, 61, shape, generator=torch.Generator().manual_seed(0))


def step(call, model, ids):
    model.zero_grad()
    logits = call(ids, use_cache=False).logits
    logits.square().mean().backward()
    return {"": logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_near(found, expected, factor=4):
    assert found.keys() == expected.keys()
    for n, y in expected.items():
        assert (found[n] - y).abs().max() <= factor * EPS * y.abs().max(), n


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in MODELS])
def test_a_training_step_is_one_graph(name):
    """Of the forward, and of the backward."""
    model, ids = model_of(name), tokens(2, 21)
    expected = step(model, model, ids)
    assert_near(step(torch.compile(model, fullgraph=True, backend="aot_eager"), model, ids), expected)


SLOW = [name for name in MODELS if name not in ("kimi_linear", "mamba2", "qwen3_5")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n
                                  for n in MODELS if n not in LAYERS])  # fmt: skip
def test_cached_decoding_is_one_graph(name):
    """States are written into the cache's."""
    model, ids = model_of(name), tokens(2, 8)

    def decoded(call):
        cache = model(ids[:, :6], use_cache=True)
        given = {n: x for n in ("past_key_values", "cache_params") if (x := getattr(cache, n, None)) is not None}
        return {n: call(ids[:, n : n + 1], use_cache=True, **given).logits for n in (6, 7)}

    with torch.no_grad():
        assert_near(decoded(torch.compile(model, fullgraph=True, backend="eager")), decoded(model))


def test_packed_prompts_by_offsets():
    model, ids = model_of("qwen3_next"), tokens(1, 9)
    positions = {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])}
    offsets = {"cu_seq_lens_q": torch.tensor([0, 5, 9], dtype=torch.int32)}
    linear = torch.compile(model.model.layers[0].linear_attn, fullgraph=True, backend="eager")
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(linear(x, **offsets), model.model.layers[0].linear_attn(x, **offsets))
        assert model(ids, use_cache=False, **positions, **offsets).logits.isfinite().all()


@pytest.mark.slow
def test_inductor():
    model, ids = model_of("qwen3_next"), tokens(2, 21)
    expected = step(model, model, ids)
    assert_near(step(torch.compile(model, fullgraph=True), model, ids), expected, 64)
