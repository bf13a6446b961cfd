"""Loss + optimiser = recurrence: every row of the table, one step at a time, from gradients that are taken numerically.

The inner losses are quadratic in S, so that a central difference with step 1 is their exact gradient.
"""

import numpy as np
import pytest

import linattn_np as la
from tests.formulas.one_head import agree, data, pull, rows, run, run_with_state

D = data()
T, K, V = D.T, D.K, D.V
q, k, ku, v, g, beta, S0 = D.q, D.k, D.ku, D.v, D.g, D.beta, D.S0
alpha, a, c = np.exp(D.g), np.exp(D.gk), np.exp(D.gv)


def gradient(loss, S):
    """dL / dS of a quadratic L, entry by entry."""
    found = np.zeros_like(S)
    for i in range(S.shape[0]):
        for j in range(S.shape[1]):
            e = np.zeros_like(S)
            e[i, j] = 1.0
            found[i, j] = (loss(S + e) - loss(S - e)) / 2
    return found


def dot(key, value):
    return lambda S: -np.sum(key @ S * value)


def square(key, value):
    return lambda S: np.sum((key @ S - value) ** 2) / 2


def descend(step):
    """Outputs read after every step, and the last state."""
    S, out = S0, []
    for t in range(T):
        S = step(t, S)
        out.append(q[t] @ S)
    return np.array(out), S


def sgd(loss, rate=lambda t: 1.0, fade=lambda t, S: S):
    """S <- fade(S) - rate_t dL_t / dS at the faded state."""

    def step(t, S):
        S = fade(t, S)
        return S - rate(t) * gradient(loss(t), S)

    return descend(step)


def shrunk(loss, weight):
    """loss + 1/2 sum of weight (.) S^2."""
    return lambda t: lambda S: loss(t)(S) + np.sum(weight(t) * S**2) / 2


ROWS = {
    "linear attention: dot product": (
        lambda: run_with_state(la.linear_attention, q, k, rows(beta) * v, state=S0),
        lambda: sgd(lambda t: dot(k[t], v[t]), lambda t: beta[t]),
    ),
    "retention: dot product and a constant shrinkage": (
        lambda: run_with_state(la.retention, q, k, v, np.log(0.8), state=S0),
        lambda: sgd(shrunk(lambda t: dot(k[t], v[t]), lambda t: 1 - 0.8)),
    ),
    "simple GLA: dot product and a shrinkage a token": (
        lambda: run_with_state(la.simple_gla, q, k, v, g, state=S0),
        lambda: sgd(shrunk(lambda t: dot(k[t], v[t]), lambda t: 1 - alpha[t])),
    ),
    "Mamba-2: the same, of dt x": (
        lambda: run_with_state(la.mamba2, v, beta, np.array(-0.3), k, q, state=S0),
        lambda: sgd(shrunk(lambda t: dot(k[t], beta[t] * v[t]), lambda t: 1 - np.exp(-0.3 * beta[t]))),
    ),
    "GLA: dot product and a shrinkage a row": (
        lambda: run_with_state(la.gla, q, k, v, D.gk, state=S0),
        lambda: sgd(shrunk(lambda t: dot(k[t], v[t]), lambda t: rows(1 - a[t]))),
    ),
    "HGRN-2: the same, of the key 1 - a": (
        lambda: run_with_state(la.hgrn2, q, v, D.gk, state=S0),
        lambda: sgd(shrunk(lambda t: dot(1 - a[t], v[t]), lambda t: rows(1 - a[t]))),
    ),
    "decaying fast weights: dot product and a shrinkage an entry": (
        lambda: run_with_state(la.dfw, q, k, v, D.gk, D.gv, state=S0),
        lambda: sgd(shrunk(lambda t: dot(k[t], v[t]), lambda t: 1 - np.outer(a[t], c[t]))),
    ),
    "delta rule: squared error": (
        lambda: run_with_state(la.delta_rule, q, ku, v, beta, state=S0),
        lambda: sgd(lambda t: square(ku[t], v[t]), lambda t: beta[t]),
    ),
    "Comba: squared error and a shrinkage, both at the old state": (
        lambda: run_with_state(la.comba, q, ku, v, ku, g, beta, state=S0),
        lambda: sgd(shrunk(lambda t: square(ku[t], v[t]), lambda t: (1 - alpha[t]) / beta[t]), lambda t: beta[t]),
    ),
    "gated delta rule: fade, then squared error": (
        lambda: run_with_state(la.gated_delta_rule, q, ku, v, g, beta, state=S0),
        lambda: sgd(lambda t: square(ku[t], v[t]), lambda t: beta[t], lambda t, S: alpha[t] * S),
    ),
    "KDA: fade by rows, then squared error": (
        lambda: run_with_state(la.kda, q, ku, v, D.gk, beta, state=S0),
        lambda: sgd(lambda t: square(ku[t], v[t]), lambda t: beta[t], lambda t, S: rows(a[t]) * S),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_step_down_the_loss_is_the_recurrence(row):
    ours, expected = (make() for make in ROWS[row])
    for one, other in zip(ours, expected, strict=True):
        agree(one, other)


def test_longhorn_is_the_minimum_of_a_proximal_loss():
    """argmin |S - S_{t-1}|^2 + beta |k S - v|^2: its gradient is 0 at the state, and the state is no other's."""
    S = S0
    for t in range(T):
        now = slice(t, t + 1)
        out, after = run_with_state(la.longhorn, q[now], k[now], v[now], beta[now], state=S)

        def loss(X, before=S, t=t):
            return np.sum((X - before) ** 2) + beta[t] * np.sum((k[t] @ X - v[t]) ** 2)

        slope, scale = gradient(loss, after), np.abs(gradient(loss, S)).max()
        assert np.abs(slope).max() <= 1e-12 * scale
        agree(out[0], q[t] @ after)
        S = after
    strength = beta / (1 + beta * np.sum(k**2, axis=1))
    agree(run_with_state(la.longhorn, q, k, v, beta, state=S0)[1], S)
    agree(run(la.longhorn, q, k, v, beta, state=S0), run(la.delta_rule, q, k, v, strength, state=S0))


def test_delta_product_is_several_steps_a_token():
    """n samples of a token, one after the other, on the state that has faded once."""
    n = 3
    wide = data(T * n)
    keys, values, rates = (x.reshape(T, n, *x.shape[1:]) for x in (wide.ku, wide.v, wide.beta))

    def step(t, S):
        S = alpha[t] * S
        for j in range(n):
            S = S - rates[t, j] * gradient(square(keys[t, j], values[t, j]), S)
        return S

    out, S = descend(step)
    ours = la.delta_product(
        q[:, None],
        keys[:, :, None],
        values[:, :, None],
        rates[..., None],
        g[:, None],
        scale=1,
        state=S0[None],
        return_state=True,
    )
    agree(ours.out[:, 0], out)
    agree(ours.state[0], S)


def test_linear_attention_is_one_full_batch_step_from_zero():
    """The squared error of all tokens so far, one step from S = 0: what linear attention does in context."""
    for t in (1, 5, T):
        loss = lambda S, t=t: sum(square(k[j], v[j])(S) for j in range(t))  # noqa: E731
        state = run_with_state(la.linear_attention, q[:t], k[:t], v[:t])[1]
        agree(state, -gradient(loss, np.zeros((K, V))))


def test_the_dot_product_has_no_lower_bound_and_the_square_has():
    """Along the steps of one repeated pair: -T |v|^2, and |v|^2 (1 - beta)^{2 T} / 2."""
    one_k, one_v, rate = ku[:1], v[:1], 0.3
    for count in (4, 40):
        keys, values = np.repeat(one_k, count, axis=0), np.repeat(one_v, count, axis=0)
        linear = run_with_state(la.linear_attention, keys, keys, values)[1]
        delta = run_with_state(la.delta_rule, keys, keys, values, np.full(count, rate))[1]
        length = np.sum(one_v**2)
        agree(dot(one_k, one_v)(linear), -count * length)
        agree(square(one_k, one_v)(delta), length * (1 - rate) ** (2 * count) / 2, 1e-9)


def test_identities_hold_for_the_pullbacks_too():
    """The rows that are equal calls have equal gradients, through the substitution's own transpose."""
    dout, dS = D.dout, D.dS
    ours = pull(la.hgrn2, q, v, D.gk, dout=dout, dstate=dS, state=S0)
    through = pull(la.gla, q, 1 - a, v, D.gk, dout=dout, dstate=dS, state=S0)
    agree(ours.q, through.q)
    agree(ours.v, through.v)
    agree(ours.g, through.g - a * through.k)
    agree(ours.state, through.state)

    size = np.sum(k**2, axis=1)
    ours = pull(la.longhorn, q, k, v, beta, dout=dout, dstate=dS, state=S0)
    through = pull(la.delta_rule, q, k, v, beta / (1 + beta * size), dout=dout, dstate=dS, state=S0)
    agree(ours.q, through.q)
    agree(ours.v, through.v)
    agree(ours.beta, through.beta / (1 + beta * size) ** 2)
    agree(ours.k, through.k - rows(2 * through.beta * (beta / (1 + beta * size)) ** 2) * k)
    agree(ours.state, through.state)
