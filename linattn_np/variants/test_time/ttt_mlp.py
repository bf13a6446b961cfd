"""TTT-MLP: a two-layer model with a layer norm learns to map keys to values, a mini-batch at a time."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...fast_weights.core import FastWeights
from ...fast_weights.types import Learner, MLPState
from ...spec import ArgSpec, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, QUERIES
from ..shared.learners import GAIN, NORM, RATE, LearnerOptions, check_learner, learns


def learner(options: Any) -> Learner:
    """LN-L2, steps of gradient descent at every token."""
    return Learner("mlp", "l2", None, options["mini_batch"], "token", options["read"], normed=True)


SPEC = VariantSpec(
    name="ttt_mlp",
    called="TTT-MLP",
    sentence="A two-layer model with a layer norm learns to map keys to values, a mini-batch at a time.",
    equation="f_W(x) = x + LN(gelu(x W1 + b1) W2 + b2);  W_t = W_{t-1} - eta_t d/dW |f_A(k_t) - v_t|^2 / 2;"
             "  out_t = scale f_R(q_t), R = A + gain_t (W_t - A), A: W when the mini-batch began",
    paper="Sun et al., Learning to (Learn at Test Time), arXiv 2407.04620",
    arrays={"q": QUERIES, "k": KEYS, "v": ArgSpec("T H K", "values"), "eta": RATE,
            "W1": ArgSpec("H K M", "initial weights of the first layer"), "b1": ArgSpec("H M", "its initial bias"),
            "W2": ArgSpec("H M K", "initial weights of the second layer"), "b2": ArgSpec("H K", "its initial bias"),
            **NORM, "gain": GAIN},
    change=learns("W1", "b1", "W2", "b2", slow=("weight", "shift")),
    core=FastWeights(learner, MLPState),
    scaled=False,
    shares_states=False,
    state=StateFormat(MLPState, wide=True,
                      axes={n + s: axes for s in ("", "_start") for n, axes in
                            (("W1", "H K M"), ("b1", "H M"), ("W2", "H M K"), ("b2", "H K"))} | {"length": ""}),
    options={"mini_batch": 16, "read": "after"},
    check_options=check_learner,
)  # fmt: skip
SAMPLES = Samples({"k": "unit", "q": "unit", "eta": "step", "gain": "positive", "W1": "half unit", "b1": "half unit",
                   "W2": "half unit", "b2": "spread", "weight": "ridge"},
                  options=({"mini_batch": 4}, {"mini_batch": 3, "read": "before"}))  # fmt: skip


@public(SPEC, SAMPLES)
def ttt_mlp(
    q: Any, k: Any, v: Any, eta: Any, W1: Any, b1: Any, W2: Any, b2: Any, weight: Any, shift: Any, gain: Any = None,
    **options: Unpack[LearnerOptions],
) -> Any:  # fmt: skip
    """TTT-MLP: a two-layer model with a layer norm learns to map keys to values, a mini-batch at a time.

        f_W(x) = x + LN(gelu(x W1 + b1) W2 + b2),   LN(z) = weight (z - mean) / sqrt(var + 1e-6) + shift
        W_t = W_{t-1} - eta_t d/dW |f_A(k_t) - v_t|^2 / 2,   W = (W1, b1, W2, b2)
        out_t = scale f_R(q_t),   R = A + gain_t (W_t - A)

    A is W as the mini-batch began: all its gradients are taken there. The next one begins at R of its last token. gelu
    is the form with tanh.

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, K)    values; LN learns v - k
    eta    (..., T, H)       step size of the token, >= 0
    W1     (H, K, M)         initial weights of the first layer, M = 4 K in published models
    b1     (H, M)            its initial bias
    W2     (H, M, K)         initial weights of the second layer
    b2     (H, K)            its initial bias
    weight (H, K)            weight of the norm, which does not learn
    shift  (H, K)            shift of the norm, which does not learn
    gain   (..., T, H)       part of the mini-batch's steps that is read; None: 1 (published models: about 1 / position)

    mini_batch=16 and read="after" are as in ttt_linear.
    scale=None means 1. Returns out (..., T, H, K), and the MLPState if return_state: what the arrays have learnt (less
    their initial values), the same as the mini-batch began, and the number of tokens so far.
    Gradients of every array, initial weights and state go through the inner gradient (docs/cores/fast_weights.md).
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: fast_weights. Common options: linattn_np.Options.
    Sun et al., Learning to (Learn at Test Time), arXiv 2407.04620.
    """
