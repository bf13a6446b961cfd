"""Random feature attention: linear attention with random Fourier features, gated or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.readouts.averages import AveragedInputs
from ...matrix_state.readouts.mapped import MappedInputs
from ...matrix_state.types import Decay, Readout
from ...ops.averages import with_ones
from ...ops.complement import complement, complement_vjp
from ...ops.feature_maps import FeatureMap, random_fourier
from ...ops.product import product
from ...ops.sums import inner
from ...runtime.arrays import Array
from ...runtime.values import is_finite, shown
from ...spec import ArgSpec, Call, Samples, VariantSpec
from ..shared.arguments import KEYS, LOG_DECAY, QUERIES, VALUES
from ..shared.similarity import CoreInputs, Similarity, SimilarityOptions, check_eps, check_whole, defaults


def maps(c: Call) -> tuple[FeatureMap, FeatureMap]:
    o = c.options
    return (random_fourier(o["num_features"], o["seed"], float(o["sigma"])),) * 2


SIMILARITY = Similarity(maps)


def _dtype_of_values(c: Call) -> Any:
    """The dtype of (1 - e^g) v: that of v where features are stored in it, too."""
    return c.v.dtype if getattr(c, "stored", None) is not None and not c.options["normalize"] else c.dtype


def to_core(c: Call) -> CoreInputs:
    """With a gate: its g, and v or [v, 1] times 1 - e^g."""
    x = SIMILARITY.to_core(c)
    if c.g is None:
        return x
    if isinstance(x, AveragedInputs):
        return x._replace(g=c.g[..., None], w=complement(c.xp, c.g, c.dtype))
    taken_in = complement(c.xp, c.g, c.dtype)[..., None]
    if c.options["normalize"]:  # the gate scales the column of ones, too
        v = with_ones(c.xp, c.v, c.dtype, taken_in)
        x = x._replace(eps=None) if isinstance(x, MappedInputs) else x
    else:
        v = product(c.xp, taken_in, c.v, dtype=_dtype_of_values(c))
    return x._replace(v=v, g=c.g[..., None])


def to_core_vjp(c: Call, d: CoreInputs) -> dict[str, Array]:
    """The gate decays the state and scales the write: two paths."""
    if c.g is None:
        return SIMILARITY.to_core_vjp(c, d)
    xp = c.xp
    if isinstance(d, AveragedInputs):
        return SIMILARITY.to_core_vjp(c, d) | {"g": complement_vjp(xp, c.g, d.g[..., 0], d.w, c.dtype)}
    taken_in, V = complement(xp, c.g, c.dtype)[..., None], c.v.shape[-1]
    grads = SIMILARITY.to_core_vjp(c, d._replace(v=product(xp, taken_in, d.v, dtype=_dtype_of_values(c))))
    written = inner(xp, d.v[..., :V], c.v, d.v[..., V] if c.options["normalize"] else None, None, c.dtype)
    return grads | {"g": complement_vjp(xp, c.g, d.g[..., 0], written, c.dtype)}


def check_options(fn: str, options: dict[str, Any]) -> None:
    check_eps(fn, options)
    check_whole(fn, options, "num_features")
    check_whole(fn, options, "seed", least=0)
    sigma = options["sigma"]
    if not is_finite(sigma) or not sigma > 0:
        raise ValueError(f"{fn}: sigma is {shown(sigma)}, expected a number above 0")


class RFAOptions(SimilarityOptions, total=False):
    """The options of a similarity, and how its features are drawn."""

    num_features: int
    seed: int
    sigma: float


SPEC = VariantSpec(
    name="rfa",
    called="Random feature attention",
    sentence="A Gaussian kernel of unit queries and keys by random Fourier features; with a gate if one is given.",
    equation="S_t = e^{g_t} S_{t-1} + (1 - e^{g_t}) phi(k_t)^T v_t;  out_t = phi(q_t) S_t / phi(q_t) z_t;  "
    "phi(x) = [sin, cos](w x)",
    paper="Peng, Pappas, Yogatama, Schwartz, Smith, Kong, Random Feature Attention, arXiv 2103.02143",
    arrays={
        "q": QUERIES,
        "k": KEYS,
        "v": VALUES,
        "g": ArgSpec("T H", "log decay of the token, <= 0; None: no gate", optional=True, limits=LOG_DECAY),
    },
    change=replace(SIMILARITY.change, to_core=to_core, to_core_vjp=to_core_vjp, by_tokens=True, keeps_out=True),
    decay=Decay.SCALAR,
    readout=Readout.NORMALISED,
    scaled=False,
    state=SIMILARITY.state,
    options={"num_features": 64, "seed": 0, "sigma": 1.0} | defaults(),
    check_options=check_options,
)
SAMPLES = Samples(options=({"normalize": False}, {}, {"num_features": 16, "seed": 3, "sigma": 2.0}, {"causal": False}))


@public(SPEC, SAMPLES)
def rfa(q: Any, k: Any, v: Any, g: Any = None, **options: Unpack[RFAOptions]) -> Any:
    """Random feature attention: a Gaussian kernel of unit queries and keys, with a gate if one is given.

        S_t = S_{t-1} + phi(k_t)^T v_t                          z_t: the same with v = 1
        S_t = e^{g_t} S_{t-1} + (1 - e^{g_t}) phi(k_t)^T v_t    with g
        out_t = scale phi(q_t) S_t / (scale phi(q_t) z_t^T + eps)        normalize=False: the numerator
        phi(x) = [sin(w_i y), cos(w_i y)] / sqrt(num_features), y = x / (sigma |x|)

    q      (..., T, Hq, K)   queries; causal=False: (..., Tq, Hq, K), every query sees every key
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    g      (..., T, H)       log decay of the token, <= 0, -inf a hard reset; None: no gate

    The mean of phi(q) phi(k)^T over draws of w is e^{-|y_q - y_k|^2 / 2}, in [e^{-2 / sigma^2}, 1]: for unit vectors
    e^{q k / sigma^2} times a constant. num_features: rows w, M is twice that. seed: of the draw. The features are
    signed: with few of them, or a small sigma, the denominator can come near 0. eps is added to it; causal=False:
    every query sees every key; normalize=False leaves the denominator out.

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state if return_state, a
    NormalisedState(S (..., H, M, V), z (..., H, M)), or S alone with normalize=False.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR (NONE without g), erase NONE. Common options: linattn_np.Options.
    Peng et al., arXiv 2103.02143; la.feature_maps.random_fourier is its map.
    """
