"""ReBased: linear attention with the square of an inner product of normed queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Readout
from ...ops.feature_maps import SQUARE
from ...ops.norms import layer_norm, weighted_layer_norm_vjp
from ...ops.sums import added
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, Call, Samples, VariantSpec
from ..shared.arguments import VALUES
from ..shared.pairs import PairInputs
from ..shared.similarity import CoreInputs, Similarity, SimilarityOptions, check_eps, defaults, rows_are_narrow

NORM_EPS = 1e-5


SIMILARITY = Similarity(lambda c: (SQUARE,) * 2)


def to_core(c: Call) -> CoreInputs:
    """The core's inputs for normed queries and keys."""
    norm = lambda x: layer_norm(c.xp, x, NORM_EPS, c.gamma, c.shift, c.dtype)  # noqa: E731
    normed = {n: None if x is None else norm(x) for n, x in (("q", c.q), ("k", c.k))}
    c.normed = c.changed(**normed)
    x = SIMILARITY.to_core(c.normed, rows_are_narrow(c))
    if isinstance(x, PairInputs):  # factors of products, as v is
        x = x._replace(q=cast(c.xp, x.q, x.v.dtype), k=cast(c.xp, x.k, x.v.dtype))
        c.normed = c.changed(q=x.q, k=x.k)
    return x


def to_core_vjp(c: Call, d: CoreInputs) -> dict[str, Array]:
    """The norm's transpose; gamma and shift belong to q and to k, so they get a sum over all tokens of both."""
    xp, grads = c.xp, SIMILARITY.to_core_vjp(c.normed, d)
    for n, x in (("q", c.q), ("k", c.k)):
        if x is None:
            continue
        gamma, shift = (None if y is None else cast(xp, y, c.dtype) for y in (c.gamma, c.shift))
        x = x if isinstance(d, PairInputs) else cast(xp, x, c.dtype)
        grads[n], *more = weighted_layer_norm_vjp(xp, x, gamma, shift, grads[n], NORM_EPS)
        for name, own in zip(("gamma", "shift"), more, strict=True):
            if own is not None:
                grads[name] = added(xp, grads[name], own) if name in grads else own
    return grads


SPEC = VariantSpec(
    name="rebased",
    called="ReBased",
    sentence="The square of an inner product of normed queries and keys.",
    equation="S_t = S_{t-1} + phi(k_t)^T v_t;  out_t = phi(q_t) S_t / phi(q_t) z_t;  "
    "phi(q) phi(k) = (q' k')^2 / K, x' = gamma norm(x) + shift",
    paper="Aksenov et al., Linear Transformers with Learnable Kernel Functions (ReBased), arXiv 2402.10644",
    arrays={
        "q": ArgSpec("T Hq K", "queries"),
        "k": ArgSpec("T Hk K", "keys"),
        "v": VALUES,
        "gamma": ArgSpec("K", "weight of the norm", optional=True),
        "shift": ArgSpec("K", "added to the norm (the paper's beta)", optional=True),
    },
    change=replace(SIMILARITY.change, to_core=to_core, to_core_vjp=to_core_vjp, by_heads=True),
    readout=Readout.NORMALISED,
    scaled=False,
    state=SIMILARITY.state,
    options=defaults(),
    check_options=check_eps,
)
SAMPLES = Samples({"q": "spread", "k": "spread", "gamma": "positive"}, ({"normalize": False}, {}, {"causal": False}))


@public(SPEC, SAMPLES)
def rebased(q: Any, k: Any, v: Any, gamma: Any = None, shift: Any = None, **options: Unpack[SimilarityOptions]) -> Any:
    """ReBased: the square of an inner product of normed queries and keys, with a learned weight and shift.

        S_t = S_{t-1} + phi(k_t)^T v_t          z_t = z_{t-1} + phi(k_t)
        out_t = scale phi(q_t) S_t / (scale phi(q_t) z_t^T + eps)        normalize=False: the numerator
        phi(q) phi(k)^T = (q' k')^2 / K, x' = gamma norm(x) + shift

    q      (..., T, Hq, K)   queries; causal=False: (..., Tq, Hq, K), every query sees every key
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    gamma  (K,)              weight of the norm; None: 1
    shift  (K,)              added to the norm (the paper's beta); None: 0

    norm takes off the mean of a row and divides by sqrt(var + 1e-5). M = K (K + 1) / 2. The square is >= 0, and 0
    where q' and k' are orthogonal: with few tokens the denominator can come near 0. eps is added to it; causal=False:
    every query sees every key; normalize=False leaves the denominator out. On a GPU bfloat16 without states takes time
    quadratic in T (explain says so); with chunk_size=64 it is linear.

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state if return_state, a
    NormalisedState(S (..., H, M, V), z (..., H, M)), or S alone with normalize=False.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay NONE, erase NONE. Common options: linattn_np.Options.
    Aksenov et al., arXiv 2402.10644; la.feature_maps.rebased is its map without gamma and shift.
    """
