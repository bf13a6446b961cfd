"""Atlas: a two-layer memory learns from a window of tokens, each step one of Muon (the Omega rule)."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...fast_weights.core import FastWeights
from ...fast_weights.types import Learner, Muon, WindowState
from ...runtime.values import is_whole, shown
from ...spec import ArgSpec, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, POSITIVE, QUERIES, VALUES
from ..shared.learners import DECAY, MOMENTUM, RATE, LearnerOptions, check_learner, check_muon, learns


class WindowOptions(LearnerOptions, total=False):
    """Also: the tokens of a loss, and Muon's coefficients."""

    window: int
    muon: Any


def learner(options: Any) -> Learner:
    """The squared error of a window, with momentum and decay at every token."""
    muon = None if options["muon"] is None else Muon(options["muon"])
    return Learner("mlp", "l2", muon, options["mini_batch"], "token", options["read"], window=options["window"])


def check(fn: str, options: dict[str, Any]) -> None:
    """Raise ValueError for a mini-batch, a window or coefficients that there are not."""
    check_learner(fn, options)
    check_muon(fn, options)
    if not is_whole(options["window"]) or options["window"] < 2:
        raise ValueError(f"{fn}: window is {shown(options['window'])}, expected a whole number from 2")


SPEC = VariantSpec(
    name="atlas",
    sentence="A two-layer memory learns from a window of tokens, each step one of Muon.",
    equation="f_W(x) = gelu(x W1) W2;  S_t = mu_t S_{t-1} - eta_t d/dA sum_{t-c<i<=t} share_i |f_A(k_i) - v_i|^2;"
             "  W_t = e^{g_t} W_{t-1} + NS(S_t);  out_t = scale f_{W_t}(q_t), A: W when the mini-batch began",
    paper="Behrouz et al., ATLAS, arXiv 2505.23735",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES, "share": ArgSpec("T H", "weight of the token in losses, >= 0",
                                                                   limits=POSITIVE),
            "eta": RATE, "mu": MOMENTUM, "g": DECAY, "W1": ArgSpec("H K M", "initial weights of the first layer"),
            "W2": ArgSpec("H M V", "initial weights of the second layer")},
    change=learns("W1", "W2", factor=2.0),
    core=FastWeights(learner, WindowState),
    scaled=False,
    shares_states=False,
    state=StateFormat(WindowState, wide=True),
    options={"mini_batch": 16, "window": 4, "muon": "keller", "read": "after"},
    check_options=check,
)  # fmt: skip
PLAIN = {"muon": None}  # for tests: small steps are too curved for Muon
SAMPLES = Samples({"k": "unit", "q": "unit", "share": "positive", "eta": "step", "mu": "share", "g": "log decay",
                   "W1": "unit", "W2": "unit"},
                  options=({"mini_batch": 4, "window": 3} | PLAIN, {"mini_batch": 1, "window": 2} | PLAIN,
                           {"mini_batch": 3, "window": 5, "read": "before"} | PLAIN))  # fmt: skip


@public(SPEC, SAMPLES)
def atlas(
    q: Any, k: Any, v: Any, share: Any, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, **options: Unpack[WindowOptions]
) -> Any:
    """Atlas: a two-layer memory learns from a window of tokens, each step one of Muon (the Omega rule).

        f_W(x) = gelu(x W1) W2
        S_t = mu_t S_{t-1} - eta_t d/dA sum_{t-c<i<=t} share_i |f_A(k_i) - v_i|^2
        W_t = e^{g_t} W_{t-1} + NS(S_t)
        out_t = scale f_{W_t}(q_t)

    A is W as the mini-batch began: all its gradients are taken there. NS is Newton-Schulz: an approximation of the
    nearest matrix with orthonormal rows or columns. Polynomial features are a map of q and k before the call
    (linattn_np.feature_maps).

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    share  (..., T, H)       weight of the token in the losses of its window, >= 0 (gamma in the paper)
    eta    (..., T, H)       step size of the token, >= 0
    mu     (..., T, H)       what remains of the momentum, in [0, 1] (theta in the paper)
    g      (..., T, H)       log decay of the weights, <= 0 (log alpha in the paper)
    W1     (H, K, M)         initial weights of the first layer
    W2     (H, M, V)         initial weights of the second layer

    window=4: tokens c of a loss, from 2 on; there is none before the first token of the sequence.
    muon="keller", "lact" or "polar_express": the coefficients of five iterations; or triples (a, b, c), one for each
    iteration; None: W_t = e^{g_t} W_{t-1} + S_t.
    mini_batch=16 and read="after" are as in ttt_linear; with mini_batch=1 each gradient is taken at the weights before
    its token.
    scale=None means 1. Returns out (..., T, H, V), and the WindowState if return_state: what the weights have learnt
    (less their initial values), the same as the mini-batch began, their momenta, the last window - 1 tokens, and the
    number of tokens so far.
    Gradients of every array, initial weights and state go through the inner gradient (docs/cores/fast_weights.md).
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: fast_weights. Common options: linattn_np.Options.
    Behrouz et al., ATLAS, arXiv 2505.23735.
    """
