"""Gates and their gradients; a memory in segments; the softmax reference."""

import numpy as np
import pytest

import linattn_np as la
from linattn_np.experiments.recall.evaluation import KNOWN
from linattn_np.experiments.recall.fixed_memories import LOW_SHARPNESS, SHARPNESS, directions
from linattn_np.experiments.recall.memories import CLASSES, LEARNED, RECURRENT, softmax_outputs

B, T, K = 2, 70, 16


def parts(state) -> list[np.ndarray]:
    return list(state) if isinstance(state, tuple) else [state]


def inputs(seed: int = 0) -> tuple[np.ndarray, ...]:
    """Classes (B, T), unit q and k, v (B, T, 1, K) in float64."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((3, B, T, 1, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return rng.integers(0, len(CLASSES), (B, T)), q, k, v


def some_logits(name: str) -> dict[str, np.ndarray]:
    """Logits away from where learning starts."""
    rng = np.random.default_rng(1)
    return {part: np.array(x) / 2 + 0.3 * rng.standard_normal(len(x)) for part, x in KNOWN[name].start.items()}


@pytest.mark.parametrize("name", LEARNED)
def test_gate_gradients_equal_central_differences(name):
    memory, logits = RECURRENT[name], some_logits(name)
    classes, q, k, v = inputs()
    dout = np.random.default_rng(2).standard_normal(v.shape)

    def value(changed: dict[str, np.ndarray]) -> float:
        return float((memory.function(*memory.arrays(changed, classes, q, k, v), scale=1) * dout).sum())

    out, pullback = la.vjp(memory.function, *memory.arrays(logits, classes, q, k, v), scale=1)
    found = memory.pullback(logits, classes, v, pullback(np.broadcast_to(dout, out.shape)))
    assert found.keys() == logits.keys()
    for part, grad in found.items():
        assert grad.shape == logits[part].shape
        for i in range(len(grad)):
            step = np.zeros_like(logits[part])
            step[i] = 1e-5
            up, down = (value(logits | {part: logits[part] + sign * step}) for sign in (1, -1))
            assert grad[i] == pytest.approx((up - down) / 2e-5, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", KNOWN)
def test_segments_with_the_state_handed_over_equal_the_whole(name):
    memory, logits = KNOWN[name], some_logits(name)
    classes, q, k, v = inputs()
    whole, last = memory.run(logits, classes, q, k, v)
    nothing, state = memory.run(logits, classes[:, :37], None, k[:, :37], v[:, :37])
    out, state = memory.run(logits, classes[:, 37:], q[:, 37:], k[:, 37:], v[:, 37:], state)
    assert nothing is None
    np.testing.assert_allclose(out, whole[:, 37:], rtol=1e-10, atol=1e-12)
    for state_half, whole_state in zip(parts(state), parts(last), strict=True):
        np.testing.assert_allclose(state_half, whole_state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", KNOWN)
def test_float32_stays_float32(name):
    classes, *arrays = inputs()
    out, state = KNOWN[name].run(some_logits(name), classes, *(x.astype(np.float32) for x in arrays))
    assert out.dtype == np.float32
    assert {S.dtype for S in parts(state) if S.dtype.kind != "i"} == {np.dtype(np.float32)}  # lengths are integers
    assert out.shape == (B, T, 1, K)
    rows = {"hgrn2": 2 * K, "based": 1 + K + K * (K + 1) // 2, "rebased": K * (K + 1) // 2, "rfa": 128, "performer": 44,
            "stick_breaking_attention": K + 1}  # fmt: skip
    assert KNOWN[name].matrix(some_logits(name), state)[0].size == rows.get(name, K) * K


def test_softmax_reference_is_causal_attention():
    _, q, k, v = inputs()
    q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    n = 5
    expected = np.empty((B, n, K))
    for i in range(n):
        t = T - n + i + 1
        scores = np.exp(32 * np.einsum("bk,btk->bt", q[:, t - 1], k[:, :t]))
        expected[:, i] = np.einsum("bt,btv->bv", scores / scores.sum(1, keepdims=True), v[:, :t])
    np.testing.assert_allclose(softmax_outputs(q[:, -n:], k, v), expected, rtol=1e-10, atol=1e-12)


def test_an_open_mlstm_answers_as_the_linear_memory():
    """Its normaliser is one positive number a query: which character has the most votes does not change."""
    classes, q, k, v = inputs()
    plain, divided = (RECURRENT[name].run({}, classes, q, k, v)[0] for name in ("linear", "mlstm"))
    share = divided / plain
    assert (share > 0).all()
    np.testing.assert_allclose(share, np.broadcast_to(share[..., :1], share.shape), rtol=1e-10)
    assert share.min() < 0.9


def test_mesa_is_the_weighted_least_squares_fit_of_all_tokens():
    classes, q, k, v = inputs()
    memory, logits = RECURRENT["mesa_net"], some_logits("mesa_net")
    out, state = memory.run(logits, classes, q, k, v)
    *_, g, beta, ridge = memory.arrays(logits, classes, q, k, v)
    for b in range(B):
        weight = beta[b, :, 0] * np.exp(g[b, :, 0].sum() - np.cumsum(g[b, :, 0]))  # beta_j e^{g_{j+1} + .. + g_T}
        root = np.sqrt(weight)[:, None]
        keys = np.concatenate([root * k[b, :, 0], np.diag(np.sqrt(ridge[0]))])  # K more pairs: the ridge
        values = np.concatenate([root * v[b, :, 0], np.zeros((K, K))])
        W = np.linalg.lstsq(keys, values, rcond=None)[0]
        np.testing.assert_allclose(out[b, -1, 0], q[b, -1, 0] @ W, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(memory.matrix(logits, state)[b, 0], W, rtol=1e-10, atol=1e-12)


def test_retention_starts_with_the_published_decays():
    classes, q, k, v = inputs()
    logits = {"head_decay": np.array(RECURRENT["retention"].start["head_decay"])}
    q4, k4, v4, _ = RECURRENT["retention"].arrays(logits, classes, q, k, v)
    published = la.retention(q4, k4, v4, scale=1).sum(2, keepdims=True)  # without g: log(1 - 2^{-5-h})
    out, _ = RECURRENT["retention"].run(logits, classes, q, k, v)
    np.testing.assert_allclose(out, published, rtol=1e-10, atol=1e-12)


def test_based_answers_with_the_polynomial_of_the_cosines():
    classes, q, k, v = inputs()
    out, _ = KNOWN["based"].run({}, classes, q, k, v)
    z = SHARPNESS * np.einsum("btk,bsk->bts", q[:, :, 0], k[:, :, 0])
    weights = np.tril(1 + z + z**2 / 2)
    expected = weights @ v[:, :, 0] / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out[:, :, 0], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [s.name for s in la.SPECS if "num_features" in s.options.defaults])
def test_random_features_approximate_the_exponential_of_the_cosines(name):
    """With 4096 of them the answer is near that of the exponential."""
    classes, q, k, v = inputs()
    memory = KNOWN[name]
    out = memory.function(*memory.arrays({}, classes, q, k, v), **memory.options, scale=1, num_features=4096)
    weights = np.tril(np.exp(LOW_SHARPNESS * np.einsum("btk,bsk->bts", q[:, :, 0], k[:, :, 0])))
    exact = weights @ v[:, :, 0] / weights.sum(-1, keepdims=True)
    assert np.linalg.norm((out[:, :, 0] - exact)[:, 20:]) < 0.4 * np.linalg.norm(exact[:, 20:])


def test_slots_hold_averages_of_the_values():
    classes, q, k, v = inputs()
    _, state = KNOWN["abc"].run({}, classes, q, k, v)
    weights = np.exp(SHARPNESS * k[:, :, 0] @ directions(K))
    expected = np.einsum("btm,btv->bmv", weights, v[:, :, 0]) / weights.sum(1)[..., None]
    np.testing.assert_allclose(KNOWN["abc"].matrix({}, state)[:, 0], expected, rtol=1e-9, atol=1e-11)


def test_longhorn_with_rate_1_is_the_delta_rule_of_one_half():
    classes, q, k, v = inputs()
    out, _ = KNOWN["longhorn"].run({}, classes, q, k, v)
    same = la.delta_rule(q, k, v, np.full(v.shape[:3], 0.5), scale=1)
    np.testing.assert_allclose(out, same, rtol=1e-10, atol=1e-12)


def test_delta_product_keeps_a_delta_memory_of_each_half_of_the_key():
    """Halves are orthogonal: two delta rules of one half, each on its own channels, and their sum is read."""
    classes, q, k, v = inputs()
    out, state = KNOWN["delta_product"].run({}, classes, q, k, v)
    expected, half = 0, np.full(v.shape[:3], 0.5)
    for part in (slice(0, K // 2), slice(K // 2, K)):
        unit = k[..., part] / np.linalg.norm(k[..., part], axis=-1, keepdims=True)
        alone, S = la.delta_rule(q[..., part], unit, v, half, scale=1, return_state=True)
        expected = expected + alone
        np.testing.assert_allclose(state[..., part, :], S, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)


def test_steps_that_share_a_key_are_one_step_of_the_delta_rule():
    """Why delta_product takes halves of the key: a second step with the same pair makes no other memory."""
    _, q, k, v = inputs()
    twice = [np.stack([x, x], axis=2) for x in (k, v)]
    beta = np.broadcast_to(np.array([0.3, 0.5])[:, None], (B, T, 2, 1))
    once = la.delta_rule(q, k, v, np.full((B, T, 1), 1 - 0.7 * 0.5), scale=1)
    np.testing.assert_allclose(la.delta_product(q, *twice, beta, scale=1), once, rtol=1e-10, atol=1e-12)


def test_transxssm_weighs_by_distance_and_turns_by_it():
    """out_i = sum_j e^{-(i - j) / 256} Re(sum_p conj(k_jp) q_ip e^{i (i - j) theta_p}) v_j"""
    classes, q, k, v = inputs()
    out, _ = KNOWN["transxssm"].run({}, classes, q, k, v)
    pairs = [x[:, :, 0, 0::2] + 1j * x[:, :, 0, 1::2] for x in (q, k)]
    far = np.arange(T)[:, None] - np.arange(T)
    theta = 10000.0 ** -np.linspace(0, 1, K // 2)
    rotation = np.exp(1j * far[..., None] * theta)
    weights = np.einsum("bip,bjp,ijp->bij", pairs[0], pairs[1].conj(), rotation).real * np.tril(np.exp(-far / 256))
    np.testing.assert_allclose(out[:, :, 0], weights @ v[:, :, 0], rtol=1e-9, atol=1e-11)


def test_attention_without_maps_gates_and_systems_is_the_reference():
    """Weak strengths and decays: votes of the softmax reference."""
    classes, q, k, v = inputs()
    expected = softmax_outputs(q[:, :, 0], k[:, :, 0], v[:, :, 0])
    for name in ("alibi", "forgetting_attention", "path_attention", "householder_positions", "deltaformer"):
        memory = KNOWN[name]
        q_, k_, v_, *rest = memory.arrays({}, classes, q, k, v)
        assert q_ is q
        assert all(np.isfinite(x).all() for x in rest)
        rest = [1e-9 * x if x.shape != k.shape else x for x in rest]
        out = memory.function(q_, k_, v_, *rest, **memory.options)
        np.testing.assert_allclose(out[:, :, 0], expected, atol=1e-5)


def test_every_variant_of_the_family_is_a_memory():
    tested = {memory.function for memory in KNOWN.values()}
    assert tested >= {fn for fn in la.VARIANTS if fn is not la.softmax_attention}


def test_iplr_holds_twice_what_longhorn_does():
    """Half is taken out in both, and the whole written instead of half."""
    classes, q, k, v = inputs()
    longhorn, iplr = (KNOWN[name].run({}, classes, q, k, v)[0] for name in ("longhorn", "iplr"))
    np.testing.assert_allclose(iplr, 2 * longhorn, rtol=1e-10, atol=1e-12)


def test_rwkv6_answers_as_gla_whose_decay_begins_a_token_later():
    """A bonus of 1 reads the token's own write; earlier writes have not yet decayed at this token."""
    classes, q, k, v = inputs()
    rwkv6, gla = (KNOWN[name] for name in ("rwkv6", "gla"))
    early = q * np.exp(-rwkv6.arrays({}, classes, q, k, v)[3])  # takes this token's decay back
    expected = la.gla(early, *gla.arrays({}, classes, q, k, v)[1:], scale=1)
    expected += ((q - early) * k).sum(-1, keepdims=True) * v
    np.testing.assert_allclose(rwkv6.run({}, classes, q, k, v)[0], expected, rtol=1e-10, atol=1e-12)
