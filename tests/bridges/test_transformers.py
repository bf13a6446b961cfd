"""transformers' models with and without linattn_np: logits, gradients, generated tokens, packed and padded prompts."""

from __future__ import annotations

import copy
import logging

import pytest

from tests.bridges.tiny_models import FULL, MODELS, build

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23", reason="the extra `transformers`")

from linattn_np.bridges.transformers import (  # noqa: E402
    FUNCTIONS,
    METHODS,
    patch_transformers,
    unpatch_transformers,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
EPS = 2.0**-23
SEQUENCES = (5, 1, 11)  # lengths of packed prompts


@pytest.fixture(autouse=True)
def _quiet_and_unpatched():
    transformers.utils.logging.set_verbosity_error()
    yield
    unpatch_transformers()


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made[name] = build(name)
        return made[name]

    return get


def tokens(*shape):
    return torch.randint(2, 61, shape, generator=torch.Generator().manual_seed(0))


def step(model, ids, **more):
    """(logits, gradients by the parameters' names) of a model."""
    model.zero_grad()
    logits = model(ids, use_cache=False, **more).logits
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def near(found, expected, factor=32):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= factor * EPS * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_every_gradient(name, models):
    """Within rounding of the model without the patch, and as near to float64 as that is."""
    model, ids = models(name), tokens(2, 21)
    logits, theirs = step(model, ids)
    with patch_transformers():
        patched, ours = step(model, ids)
        _, exact = step(copy.deepcopy(model).double(), ids)
    near(patched, logits)
    assert not torch.equal(patched, logits), "nothing has been replaced"
    assert ours.keys() == theirs.keys() == exact.keys()
    largest = max(d.abs().max() for d in exact.values())
    for n, d in exact.items():
        error, rounding = (ours[n] - d).abs().max(), 64 * EPS * (d.abs().max() + 1e-4 * largest)
        assert (ours[n] - theirs[n]).abs().max() <= 64 * EPS * (d.abs().max() + largest / 16), n
        assert error <= max(2 * (theirs[n] - d).abs().max(), rounding), n


@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_the_same(name, models):
    model, ids = models(name), tokens(2, 7)
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_logits": True,
           "return_dict_in_generate": True}  # fmt: skip
    expected = model.generate(ids, **how)
    with patch_transformers():
        found = model.generate(ids, **how)
    torch.testing.assert_close(found.sequences, expected.sequences, rtol=0, atol=0)
    for a, b in zip(found.logits, expected.logits, strict=True):
        near(a, b, 128)


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "mamba2", "minimax"])
def test_padded_prompts(name, models):
    model, ids = models(name), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    with patch_transformers():
        found = model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


PACKED = [name for name in FULL if name != "granitemoehybrid"]  # whose softmax layers are not told of positions


@pytest.mark.parametrize(("name", "said"), [
    *((name, "positions") for name in PACKED), *((name, "offsets") for name in ("qwen3_next", "kimi_linear", "bamba"))])
def test_packed_prompts_are_computed_one_by_one(name, said, models):
    """By cu_seq_lens_q, or by position_ids alone; a model without the patch computes each alone."""
    model, ids = models(name), tokens(1, sum(SEQUENCES))
    parts = ids.split(SEQUENCES, dim=1)
    alone = torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)
    more = {"position_ids": torch.cat([torch.arange(n) for n in SEQUENCES])[None]}
    if said == "offsets":
        more["cu_seq_lens_q"] = torch.tensor([0, 5, 6, 17], dtype=torch.int32)
    with patch_transformers(), torch.no_grad():
        near(model(ids, use_cache=False, **more).logits, alone.detach(), 128)


def test_gradients_of_packed_prompts(models):
    model, ids = models("qwen3_next"), tokens(1, sum(SEQUENCES))
    position_ids = torch.cat([torch.arange(n) for n in SEQUENCES])[None]
    with patch_transformers():
        _, packed = step(model, ids, position_ids=position_ids)
        model.zero_grad()
        logits = torch.cat([model(part, use_cache=False).logits for part in ids.split(SEQUENCES, 1)], 1)
        logits.square().mean().backward()
    for n, p in model.named_parameters():
        if p.grad is not None:
            assert (packed[n] - p.grad).abs().max() <= 256 * EPS * max(d.abs().max() for d in packed.values()), n


def test_models_in_training_mode():
    """Mamba-2's mixer has a path of its own there."""
    model, ids = build("mamba2").train(), tokens(2, 9)
    logits, theirs = step(model, ids)
    with patch_transformers():
        patched, ours = step(model, ids)
    near(patched, logits)
    for n, d in theirs.items():
        assert (ours[n] - d).abs().max() <= 64 * EPS * max(x.abs().max() for x in theirs.values()), n


@pytest.mark.parametrize("T", [9, 16, 37])
def test_xlstm_in_training_mode_takes_any_length(T):
    model = build("xlstm", mode="train", return_last_states=True)
    whole = build("xlstm")
    expected = step(whole, tokens(2, T))[0]
    with patch_transformers():
        near(step(model, tokens(2, T))[0], expected)


def test_everything_is_put_back_and_instances_follow(caplog):
    from transformers.models.minimax import modeling_minimax as minimax
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    def seen():
        model = qwen.Qwen3NextModel.forward
        return qwen.torch_chunk_gated_delta_rule, minimax.MiniMaxLightningAttention.forward, model

    before, model, ids = seen(), build("qwen3_next"), tokens(1, 9)
    plain = model(ids).logits
    with caplog.at_level(logging.INFO, logger="linattn_np"):
        patch = patch_transformers(["qwen3_next", "minimax"])
    assert [r.getMessage() for r in caplog.records] == [
        f"linattn_np computes the linear attention of transformers {transformers.__version__}: minimax, qwen3_next"]
    assert patch_transformers() is patch
    assert not torch.equal(model(ids).logits, plain)  # built before
    assert all(a is not b for a, b in zip(seen(), before, strict=True))
    unpatch_transformers()
    unpatch_transformers()
    assert seen() == before
    assert torch.equal(model(ids).logits, plain)
    with patch_transformers(["qwen3_next"]):
        assert seen()[0] is not before[0]
    assert seen() == before


def test_the_table_names_what_transformers_has():
    """Every function and class of the table is found in some model, and every model has one."""
    patch = patch_transformers()
    names = {(owner.__name__, name) for owner, name, _ in patch.replaced}
    assert {name for _, name in names} == {*FUNCTIONS, "forward"}
    assert METHODS.keys() <= {owner for owner, _ in names}


def test_a_version_without_the_functions(monkeypatch):
    from linattn_np.bridges import transformers as bridge

    monkeypatch.setattr(bridge, "FUNCTIONS", {})
    monkeypatch.setattr(bridge, "METHODS", {})
    with pytest.raises(RuntimeError, match=r"expected a version >= 5\.23"):
        patch_transformers(["qwen3_next"])


def test_what_the_fallback_does_where_a_tensor_is_not_supported(models):
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    q = torch.empty(1, 4, 2, 8, device="meta")
    with patch_transformers(["qwen3_next"]):
        out, _ = qwen.torch_chunk_gated_delta_rule(q, q, q, g=q[..., 0], beta=q[..., 0])
    assert out.device.type == "meta"
