"""Titans: a memory that learns by gradient descent with momentum and decay."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...fast_weights.core import FastWeights
from ...fast_weights.types import Learner, LinearMomentum, MLPMomentum
from ...spec import ArgSpec, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, QUERIES, VALUES
from ..shared.learners import DECAY, MOMENTUM, RATE, LearnerOptions, check_learner, learns

GATES = {"eta": RATE, "mu": MOMENTUM, "g": DECAY}
PAPER = "Behrouz, Zhong, Mirrokni, Titans, arXiv 2501.00663"
OPTIONS = {"mini_batch": 16, "read": "after"}
STEPS = (
    "S_t = mu_t S_{t-1} - eta_t d/dA |f_A(k_t) - v_t|^2;  W_t = e^{g_t} W_{t-1} + S_t;  out_t = scale f_{W_t}(q_t),"
    " A: W when the mini-batch began"
)


def learner(model: str) -> Any:
    """The squared error, with momentum and decay at every token."""
    return lambda options: Learner(model, "l2", None, options["mini_batch"], "token", options["read"])


LINEAR = VariantSpec(
    name="titans_linear",
    called="Titans, linear",
    sentence="A matrix learns to map keys to values, by gradient descent with momentum and decay.",
    equation=f"f_W(x) = x W;  {STEPS}",
    paper=PAPER,
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES, **GATES, "W": ArgSpec("H K V", "initial weights")},
    change=learns("W", factor=2.0),
    core=FastWeights(learner("linear"), LinearMomentum),
    scaled=False,
    shares_states=False,
    state=StateFormat(
        LinearMomentum,
        wide=True,
        no_summary="mini-batches begin at places counted from the first token: a span alone does not know its own; "
        "with mini_batch=1 it is momentum_delta_rule of beta = 1, which has one",
    ),
    options=OPTIONS,
    check_options=check_learner,
)
DEEP = VariantSpec(
    name="titans",
    sentence="A two-layer memory learns to map keys to values, by gradient descent with momentum and decay.",
    equation=f"f_W(x) = gelu(x W1) W2;  {STEPS}",
    paper=PAPER,
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES, **GATES, "W1": ArgSpec("H K M", "initial weights of the first layer"),
            "W2": ArgSpec("H M V", "initial weights of the second layer")},
    change=learns("W1", "W2", factor=2.0),
    core=FastWeights(learner("mlp"), MLPMomentum),
    scaled=False,
    shares_states=False,
    state=StateFormat(MLPMomentum, wide=True),
    options=OPTIONS,
    check_options=check_learner,
)  # fmt: skip
SAMPLES = Samples({"k": "unit", "q": "unit", "eta": "step", "mu": "share", "g": "log decay", "W": "half unit",
                   "W1": "unit", "W2": "unit"},
                  options=({"mini_batch": 4}, {"mini_batch": 1}, {"mini_batch": 3, "read": "before"}))  # fmt: skip


@public(LINEAR, SAMPLES)
def titans_linear(q: Any, k: Any, v: Any, eta: Any, mu: Any, g: Any, W: Any, **options: Unpack[LearnerOptions]) -> Any:
    """Titans with a linear memory: a matrix learns by gradient descent with momentum and decay.

        S_t = mu_t S_{t-1} - 2 eta_t k_t^T (k_t A - v_t)
        W_t = e^{g_t} W_{t-1} + S_t
        out_t = scale q_t W_t

    A is W as the mini-batch began: all its gradients are taken there, those of |k_t A - v_t|^2.

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    eta    (..., T, H)       step size of the token, >= 0 (theta in the paper)
    mu     (..., T, H)       what remains of the momentum, in [0, 1] (eta in the paper)
    g      (..., T, H)       log decay of the weights, <= 0 (log(1 - alpha) in the paper)
    W      (H, K, V)         initial weights

    mini_batch=16 and read="after" are as in ttt_linear; with mini_batch=1 each gradient is taken at the weights before
    its token.
    scale=None means 1. Returns out (..., T, H, V), and the LinearMomentum if return_state: what W has learnt (W - W_0),
    the same as the mini-batch began, the momentum S, and the number of tokens so far.
    Gradients of every array, initial weights and state go through the inner gradient (docs/cores/fast_weights.md).
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: fast_weights. Common options: linattn_np.Options.
    Behrouz, Zhong, Mirrokni, Titans, arXiv 2501.00663.
    """


@public(DEEP, SAMPLES)
def titans(
    q: Any, k: Any, v: Any, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, **options: Unpack[LearnerOptions]
) -> Any:
    """Titans: a two-layer memory learns to map keys to values, by gradient descent with momentum and decay.

        f_W(x) = gelu(x W1) W2
        S_t = mu_t S_{t-1} - eta_t d/dA |f_A(k_t) - v_t|^2
        W_t = e^{g_t} W_{t-1} + S_t
        out_t = scale f_{W_t}(q_t)

    A is W as the mini-batch began: all its gradients are taken there. gelu is the form with tanh.

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    eta    (..., T, H)       step size of the token, >= 0 (theta in the paper)
    mu     (..., T, H)       what remains of the momentum, in [0, 1] (eta in the paper)
    g      (..., T, H)       log decay of the weights, <= 0 (log(1 - alpha) in the paper)
    W1     (H, K, M)         initial weights of the first layer
    W2     (H, M, V)         initial weights of the second layer

    mini_batch=16 and read="after" are as in ttt_linear; with mini_batch=1 each gradient is taken at the weights before
    its token.
    scale=None means 1. Returns out (..., T, H, V), and the MLPMomentum if return_state: what the weights have learnt
    (less their initial values), the same as the mini-batch began, their momenta, and the number of tokens so far.
    Gradients of every array, initial weights and state go through the inner gradient (docs/cores/fast_weights.md).
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: fast_weights. Common options: linattn_np.Options.
    Behrouz, Zhong, Mirrokni, Titans, arXiv 2501.00663.
    """
