"""transformers' models with and without linattn_np: logits, gradients, generated tokens, packed and padded prompts."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest

from tests.bridges.models.tiny_models import FULL, MODELS, build

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23", reason="the extra `transformers`")

from linattn_np.bridges.transformers import patch_transformers, unpatch_transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
EPS = 2.0**-23
CACHES = ("cache", "past_key_values", "cache_params")  # its name in the versions
SEQUENCES = (5, 1, 11)  # lengths of packed prompts


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny operations: more threads only wait for each other, for seconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    """In training mode: within rounding of the model without the patch, and as near to float64 as that is."""
    model, ids = copy.deepcopy(models(name)).train(), tokens(2, 21)
    logits, theirs = step(model, ids)
    with patch_transformers():
        patched, ours = step(model, ids)
        _, exact = step(model.double(), ids)
    near(patched, logits)
    assert any(not torch.equal(ours[n], d) for n, d in theirs.items()), "nothing has been replaced"
    assert ours.keys() == theirs.keys() == exact.keys()
    largest = max(d.abs().max() for d in exact.values())
    for n, d in exact.items():
        error, rounding = (ours[n] - d).abs().max(), 64 * EPS * (d.abs().max() + 1e-4 * largest)
        assert (ours[n] - theirs[n]).abs().max() <= 64 * EPS * (d.abs().max() + largest / 16), n
        assert error <= max(2 * (theirs[n] - d).abs().max(), rounding), n


def generated(model, ids, **how):
    """(tokens, logits) of four tokens by greedy or beam search."""
    found = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, output_logits=True,
                           return_dict_in_generate=True, **how)  # fmt: skip
    return found.sequences, torch.stack(found.logits, 1)


def padded(model, ids):
    """Generated tokens of a prompt with four tokens of padding on the left, and of one without."""
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return generated(model, ids, attention_mask=mask)


def continued(model, ids, sizes):
    """(ids, logits) of calls on parts of the prompt, each with the cache of the last."""
    name = next(n for n in CACHES if n in inspect.signature(model.forward).parameters)
    more, logits = {}, []
    for part in ids.split(sizes, dim=1):
        with torch.no_grad():
            out = model(part, use_cache=True, **more)
        more, logits = {name: out[name]}, [*logits, out.logits]
    return ids, torch.cat(logits, 1)


USES = {
    "greedy": generated,
    "beams": functools.partial(generated, num_beams=2),
    "padded": padded,
    "prompt in chunks": functools.partial(continued, sizes=[4, 1, 4]),
    "token by token": functools.partial(continued, sizes=1),
}
# by transformers, with and without the patch; RecurrentGemma returns no cache
REFUSED = [("xlstm", "beams"), ("recurrent_gemma", "prompt in chunks"), ("recurrent_gemma", "token by token")]
LAYERS = {("minimax", "prompt in chunks"): {"layer_types": ["full_attention", "linear_attention"]}}  # where it can


@pytest.mark.parametrize(("name", "use"), [(n, use) for n in MODELS for use in USES if (n, use) not in REFUSED])
def test_a_cache_gives_the_tokens_and_logits_of_the_model_without_the_patch(name, use, models):
    model, ids = build(name, **LAYERS[name, use]) if (name, use) in LAYERS else models(name), tokens(2, 9)
    expected, logits = USES[use](model, ids)
    with patch_transformers():
        found, patched = USES[use](model, ids)
    assert torch.equal(found, expected)
    near(patched, logits, 128)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_hidden_states_of_a_trainer(name, models):
    """The keywords that transformers hands to every layer have no effect on the recurrences."""
    model, ids = models(name), tokens(2, 9)
    how = {"labels": ids, "num_items_in_batch": torch.tensor(16), "output_hidden_states": True, "use_cache": False}
    expected = model(ids, **how)
    with patch_transformers():
        found = model(ids, **how)
    near(found.loss, expected.loss)
    for a, b in zip(found.hidden_states, expected.hidden_states, strict=True):
        near(a, b, 128)


POSITIONS = torch.cat([torch.arange(n) for n in SEQUENCES])[None]
OFFSETS = torch.tensor([0, 5, 6, 17], dtype=torch.int32)
NUMBERS = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(SEQUENCES))[None]
MARKS = {
    "positions": {"position_ids": POSITIONS}, "offsets": {"cu_seq_lens_q": OFFSETS}, "numbers": {"seq_idx": NUMBERS},
    "all": {"position_ids": POSITIONS, "cu_seq_lens_q": OFFSETS, "seq_idx": NUMBERS},
}  # fmt: skip
ACROSS = {"mamba": "MambaForCausalLM", "falcon_mamba": "FalconMambaForCausalLM", "jamba": "JambaModel",
          "recurrent_gemma": "RecurrentGemmaModel",
          "mamba2": "Mamba2ForCausalLM", "xlstm": "xLSTMModel", "glm5_next": "Glm5NextModel",
          "qwen4_exp": "Qwen4ExpTextModel"}  # fmt: skip


def alone(model, ids):
    """The logits of each sequence by itself."""
    with torch.no_grad():
        return torch.cat([model(part, use_cache=False).logits for part in ids.split(SEQUENCES, dim=1)], dim=1)


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_prompts_are_computed_one_by_one_or_refused(name, mark, models):
    """However they are marked; a model without the patch computes each alone."""
    model, ids = models(name), tokens(1, sum(SEQUENCES))
    expected = alone(model, ids)
    with patch_transformers(), torch.no_grad():
        if name in ACROSS:
            with pytest.raises(ValueError, match=rf"^{ACROSS[name]}: (.*) marks packed sequences, expected one seq"):
                model(ids, **MARKS[mark])
        else:
            near(model(ids, **MARKS[mark]).logits, expected, 128)


def test_models_without_what_runs_across_sequences_keep_them_apart(models):
    ids = tokens(1, sum(SEQUENCES))
    model, lm = build("qwen4_exp", ple_layer_ids=[]), models("mamba2")
    expected, other = alone(model, ids), alone(lm, ids)
    with patch_transformers(), torch.no_grad():
        for how in MARKS.values():
            near(model(ids, **how).logits, expected, 128)
            near(lm.lm_head(lm.backbone(ids, use_cache=False, **how)[0]), other, 128)


@pytest.mark.parametrize("name", [name for name in FULL if name not in ACROSS])
def test_packed_prompts_in_calls_that_would_run_across_them_are_refused(name, models):
    model, ids = models(name), tokens(1, sum(SEQUENCES))
    cache = model(ids, use_cache=True)
    cache = {n: cache[n] for n in CACHES if n in cache}
    assert cache
    wrong = [
        (ids, MARKS["positions"] | {"use_cache": True}, "and a cache, expected use_cache=False"),
        (ids, MARKS["offsets"] | cache, "and a cache, expected use_cache=False"),
        (ids, MARKS["offsets"] | {"attention_mask": torch.ones_like(ids)}, "and a mask of shape"),
        (ids.expand(2, -1), MARKS["positions"], "in 2 rows, expected one row"),
        (ids, MARKS["offsets"] | {"position_ids": torch.arange(17)[None]}, "position_ids go up by one where a seq"),
    ]
    with patch_transformers():
        for x, how, message in wrong:
            with pytest.raises(ValueError, match=message):
                model(x, **how)


def test_positions_with_a_mask_or_a_cache_mark_no_sequences(models):
    """As in transformers: left padding has positions that do not go up by one."""
    model, ids = models("qwen3_next"), tokens(1, 9)
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    how = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=1), "use_cache": False}
    expected = model(ids, **how).logits
    with patch_transformers():
        near(model(ids, **how).logits[:, 4:], expected[:, 4:])


def test_gradients_of_packed_prompts(models):
    model, ids = models("qwen3_next"), tokens(1, sum(SEQUENCES))
    with patch_transformers():
        _, packed = step(model, ids, position_ids=POSITIONS)
        model.zero_grad()
        logits = torch.cat([model(part, use_cache=False).logits for part in ids.split(SEQUENCES, 1)], 1)
        logits.square().mean().backward()
    for n, p in model.named_parameters():
        if p.grad is not None:
            assert (packed[n] - p.grad).abs().max() <= 256 * EPS * max(d.abs().max() for d in packed.values()), n


@pytest.mark.parametrize("T", [9, 16, 37])
def test_xlstm_in_training_mode_takes_any_length(T):
    model = build("xlstm", mode="train", return_last_states=True)
    whole = build("xlstm")
    expected = step(whole, tokens(2, T))[0]
    with patch_transformers():
        near(step(model, tokens(2, T))[0], expected)


@pytest.mark.parametrize("B", [2, 3])
def test_xlstm_trains_without_its_last_states(B):
    models = {last: build("xlstm", mode="train", return_last_states=last).train() for last in (True, False)}
    ids = tokens(B, 16)
    expected = step(models[True], ids)
    with patch_transformers():
        logits, gradients = step(models[False], ids)
        cached = models[False](ids, use_cache=True)
    near(logits, expected[0])
    for n, d in expected[1].items():
        near(gradients[n], d, 2048)
    near(cached.logits, logits)


def test_xlstm_gives_a_pair_where_no_states_are_asked_for():
    from transformers.models.xlstm.modeling_xlstm import xLSTMBackend

    backend = xLSTMBackend(build("xlstm", mode="train", return_last_states=False).config)
    x, gate = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5)
    with patch_transformers():
        h, none = backend(x, x, x, gate, gate)
        again, (C, n, m) = backend(x, x, x, gate, gate, return_last_states=True)
    assert none is None
    assert torch.equal(h, again)
    assert (C.shape, n.shape, m.shape) == ((2, 2, 8, 8), (2, 2, 8), (2, 2, 1))
