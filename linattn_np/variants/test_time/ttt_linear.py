"""TTT-Linear: a linear model with a layer norm learns to map keys to values, a mini-batch at a time."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...fast_weights.core import FastWeights
from ...fast_weights.types import Learner, LinearState
from ...spec import ArgSpec, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, QUERIES
from ..shared.learners import GAIN, NORM, RATE, LearnerOptions, check_learner, learns


def learner(options: Any) -> Learner:
    """LN-L2, steps of gradient descent at every token."""
    return Learner("linear", "l2", None, options["mini_batch"], "token", options["read"], normed=True)


SPEC = VariantSpec(
    name="ttt_linear",
    called="TTT-Linear",
    sentence="A linear model with a layer norm learns to map keys to values, a mini-batch at a time.",
    equation="f_{W,b}(x) = x + LN(x W + b);  W_t, b_t = W_{t-1}, b_{t-1} - eta_t d/d(W,b) |f_A(k_t) - v_t|^2 / 2;"
             "  out_t = scale f_R(q_t), R = A + gain_t ((W_t, b_t) - A), A: (W, b) when the mini-batch began",
    paper="Sun et al., Learning to (Learn at Test Time), arXiv 2407.04620",
    arrays={"q": QUERIES, "k": KEYS, "v": ArgSpec("T H K", "values"), "eta": RATE,
            "W": ArgSpec("H K K", "initial weights"), "b": ArgSpec("H K", "initial bias"),
            **NORM, "gain": GAIN},
    change=learns("W", "b", slow=("weight", "shift")),
    core=FastWeights(learner, LinearState),
    scaled=False,
    shares_states=False,
    state=StateFormat(LinearState, wide=True,
                      axes={"W": "H K K", "b": "H K", "W_start": "H K K", "b_start": "H K", "length": ""}),
    options={"mini_batch": 16, "read": "after"},
    check_options=check_learner,
)  # fmt: skip
SAMPLES = Samples({"k": "unit", "q": "unit", "eta": "step", "gain": "positive", "W": "half unit", "b": "spread",
                   "weight": "ridge"},
                  options=({"mini_batch": 4}, {"mini_batch": 3, "read": "before"}))  # fmt: skip


@public(SPEC, SAMPLES)
def ttt_linear(
    q: Any, k: Any, v: Any, eta: Any, W: Any, b: Any, weight: Any, shift: Any, gain: Any = None,
    **options: Unpack[LearnerOptions],
) -> Any:  # fmt: skip
    """TTT-Linear: a linear model with a layer norm learns to map keys to values, a mini-batch at a time.

        f_{W,b}(x) = x + LN(x W + b),   LN(z) = weight (z - mean) / sqrt(var + 1e-6) + shift
        W_t, b_t = W_{t-1}, b_{t-1} - eta_t d/d(W,b) |f_A(k_t) - v_t|^2 / 2
        out_t = scale f_R(q_t),   R = A + gain_t ((W_t, b_t) - A)

    A is (W, b) as the mini-batch began: all its gradients are taken there. The next one begins at R of its last token.

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, K)    values; LN learns v - k
    eta    (..., T, H)       step size of the token, >= 0
    W      (H, K, K)         initial weights
    b      (H, K)            initial bias
    weight (H, K)            weight of the norm, which does not learn
    shift  (H, K)            shift of the norm, which does not learn
    gain   (..., T, H)       part of the mini-batch's steps that is read; None: 1 (published models: about 1 / position)

    mini_batch=16: tokens whose gradients are taken at the same weights; positions count from the start of the sequence,
    also across calls with a state, and a last mini-batch may be shorter.
    read="after": a query reads the weights after its token's step; "before": those before it.
    scale=None means 1. Returns out (..., T, H, K), and the LinearState if return_state: what W and b have learnt
    (W - W_0, b - b_0), the same as the mini-batch began, and the number of tokens so far.
    Gradients of every array, initial weights and state go through the inner gradient (docs/cores/fast_weights.md).
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: fast_weights. Common options: linattn_np.Options.
    Sun et al., Learning to (Learn at Test Time), arXiv 2407.04620.
    """
