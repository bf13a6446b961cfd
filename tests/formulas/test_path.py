"""PaTH attention of text 002: its matrix, its special cases, transformed queries and keys: 3.10, 3.23 to 3.26."""

import numpy as np
import pytest

import linattn_np as la
from tests.formulas.one_head import A, agree, data, pull, run, tri, unit

SIZES = [(12, 5, 3), (65, 5, 3), (33, 16, 7)]
FORMS = [{}, {"backend": "chunks", "chunk_size": 16}, {"backend": "reference"}]


@pytest.fixture(params=SIZES, ids=str)
def D(request):
    D = data(*request.param)
    D.w = unit(D.w)
    return D


def logits(*arrays, **options):
    """Of the pairs j <= i, zeros above."""
    matrix = A(la.path_attention, *arrays, normalize=False, **options)
    return tri(np.log(np.where(np.tri(len(matrix)) > 0, matrix, 1)))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_3_10_the_logits_in_closed_form(D, form):
    q, k, w, beta = D.q, D.k, D.w, D.beta
    middle = np.eye(D.T) + beta[:, None] * (w @ w.T) * D.M_strict
    expected = tri(q @ k.T) - tri(q @ w.T) @ np.linalg.solve(middle, beta[:, None] * (w @ k.T) * D.M_strict)
    agree(logits(q, k, D.v, w, beta, **form), expected, 1e-11)
    b = np.cumsum(D.g)
    agree(logits(q, k, D.v, w, beta, D.g, **form), tri(expected + b[:, None] - b), 1e-11)


def test_3_23_keys_as_directions_are_the_delta_rule(D):
    k = unit(D.k)
    agree(logits(D.q, k, D.v, k, D.one), A(la.delta_rule, D.q, k, D.v, D.one), 1e-11)


def test_3_23_no_maps_are_softmax_attention(D):
    zero = 0 * D.beta
    agree(run(la.path_attention, D.q, D.k, D.v, D.w, zero), run(la.softmax_attention, D.q, D.k, D.v))
    agree(run(la.path_attention, D.q, D.k, D.v, D.w, zero, D.g), run(la.forgetting_attention, D.q, D.k, D.v, D.g))


@pytest.mark.parametrize("beta_norm", [(1, 2), (2, 1)], ids=["beta 1, |w|^2 2", "beta 2, |w|^2 1"])
def test_3_24_reflections_turn_queries_and_keys(D, beta_norm):
    beta, w = beta_norm[0] * D.one, np.sqrt(beta_norm[1]) * D.w
    q, k = (x - run(la.delta_rule, x, w, w, beta) for x in (D.q, D.k))
    agree(run(la.path_attention, D.q, D.k, D.v, w, beta), run(la.softmax_attention, q, k, D.v), 1e-11)
    # along the surface of reflections the gradients of q, k and v agree too
    ours = pull(la.path_attention, D.q, D.k, D.v, w, beta, dout=D.dout)
    through = pull(la.softmax_attention, q, k, D.v, dout=D.dout)
    of_q, of_k = (pull(la.delta_rule, x, w, w, beta, dout=d) for x, d in ((D.q, through.q), (D.k, through.k)))
    agree(ours.q, through.q - of_q.q, 1e-11)
    agree(ours.k, through.k - of_k.q, 1e-11)
    agree(ours.v, through.v, 1e-11)


@pytest.mark.parametrize("strength", [0.1, 1.0, 2.0])
def test_3_25_queries_and_keys_less_their_own_outputs(D, strength):
    beta, w = strength * D.beta / D.beta.max(), D.w
    q, k = (x - run(la.delta_rule, x, w, w, beta) for x in (D.q, D.k))
    agree(run(la.householder_positions, D.q, D.k, D.v, w, beta), run(la.softmax_attention, q, k, D.v), 1e-11)
    ours = pull(la.householder_positions, D.q, D.k, D.v, w, beta, dout=D.dout)
    through = pull(la.softmax_attention, q, k, D.v, dout=D.dout)
    of_q, of_k = (pull(la.delta_rule, x, w, w, beta, dout=d) for x, d in ((D.q, through.q), (D.k, through.k)))
    agree(ours.q, through.q - of_q.q, 1e-11)
    agree(ours.k, through.k - of_k.q, 1e-11)
    agree(ours.v, through.v, 1e-11)
    agree(ours.w, -(of_q.k + of_q.v + of_k.k + of_k.v), 1e-11)
    agree(ours.beta, -(of_q.beta + of_k.beta), 1e-11)


def test_3_25_reflections_are_path_attention(D):
    two = 2 * D.one
    ours, other = (run(fn, D.q, D.k, D.v, D.w, two) for fn in (la.householder_positions, la.path_attention))
    agree(ours, other, 1e-11)


@pytest.mark.parametrize("norm", [0.5, 2.0])
def test_3_26_many_maps_stay_bounded(norm):
    """Logits of 600 equal directions: (1 - norm)^{i - j} along them."""
    T, K = 600, 4
    w = np.tile(unit(np.ones((1, K))), (T, 1))
    one = np.ones((T, 1))
    found = logits(w, w, one, w, norm * np.ones(T))
    distance = np.arange(T)[:, None] - np.arange(T)
    agree(found, tri((1.0 - norm) ** np.maximum(distance, 0)), 1e-11)
