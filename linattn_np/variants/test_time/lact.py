"""LaCT: a SwiGLU learns from large chunks, each one step of Muon."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...fast_weights.core import FastWeights
from ...fast_weights.types import Learner, Muon, SwiGLUMomentum
from ...spec import ArgSpec, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, QUERIES, VALUES
from ..shared.learners import MILD, MOMENTUM, RATE, check_learner, check_muon, learns


class LargeChunkOptions(Options, total=False):
    """The common options, the tokens of a chunk, and Muon's coefficients and matrices."""

    mini_batch: int
    muon: Any
    stacked: bool


def learner(options: Any) -> Learner:
    """-<f(k), v>, one step for each chunk, columns of constant length."""
    muon = None if options["muon"] is None else Muon(options["muon"], 2 if options["stacked"] else 1)
    return Learner("swiglu", "dot", muon, options["mini_batch"], "mini_batch", "before", renormed=True)


def check(fn: str, options: dict[str, Any]) -> None:
    """Raise ValueError for a mini-batch or coefficients that there are not."""
    check_learner(fn, options)
    check_muon(fn, options)


SPEC = VariantSpec(
    name="lact",
    called="LaCT",
    sentence="A SwiGLU learns from large chunks, each one step of Muon.",
    equation="f(x) = (silu(x A) * (x B)) W;  P' = (mean mu) P - sum_t eta_t d/d(A,B,W) -<f(k_t), v_t> over a chunk;"
             "  (A, B, W)' = columns of (A, B, W) + NS(P') with their first lengths;  out_t = scale f(q_t), before the"
             " step of its chunk",
    paper="Zhang et al., Test-Time Training Done Right, arXiv 2505.23884",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES, "eta_A": RATE, "eta_B": RATE, "eta_W": RATE, "mu": MOMENTUM,
            "A": ArgSpec("H K M", "initial weights of the gate"), "B": ArgSpec("H K M", "initial weights beside it"),
            "W": ArgSpec("H M V", "initial weights of the output")},
    change=learns("A", "B", "W", etas=("eta_A", "eta_B", "eta_W")),
    core=FastWeights(learner, SwiGLUMomentum),
    scaled=False,
    shares_states=False,
    state=StateFormat(SwiGLUMomentum, wide=True),
    options={"mini_batch": 2048, "muon": "lact", "stacked": False},
    check_options=check,
)  # fmt: skip
SAMPLES = Samples({"k": "unit", "q": "unit", "eta_A": "positive", "eta_B": "positive", "eta_W": "positive",
                   "mu": "share", "A": "spread", "B": "spread", "W": "spread"},
                  options=({"mini_batch": 5, "muon": MILD}, {"mini_batch": 4, "muon": MILD * 2, "stacked": True},
                           {"mini_batch": 3, "muon": None}))  # fmt: skip


@public(SPEC, SAMPLES)
def lact(
    q: Any, k: Any, v: Any, eta_A: Any, eta_B: Any, eta_W: Any, mu: Any, A: Any, B: Any, W: Any,
    **options: Unpack[LargeChunkOptions],
) -> Any:  # fmt: skip
    """LaCT (large-chunk test-time training): a SwiGLU learns from large chunks, each one step of Muon.

        f(x) = (silu(x A) * (x B)) W
        out_t = scale f(q_t), before the step of its chunk
        P <- (mean mu) P - sum_t eta_t d/d(A,B,W) -<f(k_t), v_t>   over the tokens of the chunk
        (A, B, W) <- (A, B, W) + NS(P), then every column gets the length that it had at first

    NS is Newton-Schulz: an approximation of the nearest matrix with orthonormal rows or columns.

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    eta_A  (..., T, H)       step size of the token for A, >= 0
    eta_B  (..., T, H)       step size of the token for B, >= 0
    eta_W  (..., T, H)       step size of the token for W, >= 0
    mu     (..., T, H)       momentum, in [0, 1]; its mean over the chunk remains
    A      (H, K, M)         initial weights of the gate
    B      (H, K, M)         initial weights beside it
    W      (H, M, V)         initial weights of the output

    mini_batch=2048: tokens of a chunk, counted from the start of the sequence; a last, shorter one makes no step.
    muon="lact", "keller" or "polar_express": the coefficients of five iterations; or triples (a, b, c), one for each
    iteration; None: no Muon. stacked=True: A and B are one matrix [A B] there; published code has both.
    scale=None means 1. Returns out (..., T, H, V), and the SwiGLUMomentum if return_state: what the weights have learnt
    (less their initial values; within a chunk with the sum of its steps), the same as the chunk began, the momenta P,
    the sum of mu in the chunk, and the number of tokens so far.
    Gradients of every array, initial weights and state go through gradient, Newton-Schulz and lengths
    (docs/cores/fast_weights.md).
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: fast_weights. Common options: linattn_np.Options.
    Zhang et al., Test-Time Training Done Right, arXiv 2505.23884.
    """
