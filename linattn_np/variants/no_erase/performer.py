"""Performer: linear attention with positive orthogonal random features of softmax's exponential."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Readout
from ...ops.feature_maps import FeatureMap, favor_plus
from ...spec import Call, Samples, VariantSpec
from ..shared.arguments import KEYS, QUERIES, VALUES
from ..shared.similarity import Similarity, SimilarityOptions, check_eps, check_whole, defaults


def maps(c: Call) -> tuple[FeatureMap, FeatureMap]:
    o = c.options
    return (favor_plus(o["num_features"], o["seed"], o["hyperbolic"]),) * 2


SIMILARITY = Similarity(maps)


def check_options(fn: str, options: dict[str, Any]) -> None:
    check_eps(fn, options)
    check_whole(fn, options, "seed", least=0)
    m = options["num_features"]
    if m is not None:
        check_whole(fn, options, "num_features")
        if m % 2 and options["hyperbolic"]:
            raise ValueError(f"{fn}: num_features is {m}, expected an even number with hyperbolic=True")


class PerformerOptions(SimilarityOptions, total=False):
    """The options of a similarity, and how its features are drawn."""

    num_features: int | None
    seed: int
    hyperbolic: bool


SPEC = VariantSpec(
    name="performer",
    sentence="Softmax attention's exponential by positive orthogonal random features.",
    equation="S_t = S_{t-1} + phi(k_t)^T v_t;  out_t = phi(q_t) S_t / phi(q_t) z_t;  "
    "phi(x) = e^{w x - x^2 / 2} of random w",
    paper="Choromanski et al., Rethinking Attention with Performers, arXiv 2009.14794",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES},
    change=SIMILARITY.change,
    readout=Readout.NORMALISED,
    scaled=False,
    state=SIMILARITY.state,
    options={"num_features": None, "seed": 0, "hyperbolic": False} | defaults(),
    check_options=check_options,
)
SAMPLES = Samples(
    options=({"normalize": False}, {}, {"hyperbolic": True, "num_features": 6, "seed": 3}, {"causal": False})
)


@public(SPEC, SAMPLES)
def performer(q: Any, k: Any, v: Any, **options: Unpack[PerformerOptions]) -> Any:
    """Performer: softmax attention's exponential replaced by positive orthogonal random features (FAVOR+).

        S_t = S_{t-1} + phi(k_t)^T v_t          z_t = z_{t-1} + phi(k_t)
        out_t = scale phi(q_t) S_t / (scale phi(q_t) z_t^T + eps)        normalize=False: the numerator
        phi(x)_i = e^{w_i y - |y|^2 / 2} / sqrt(M), y = x K^{-1/4}

    q      (..., T, Hq, K)   queries; causal=False: (..., Tq, Hq, K), every query sees every key
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values

    The mean of phi(q) phi(k)^T over draws of w is e^{q k / sqrt(K)}. num_features: M, None means K log K. seed: of the
    draw, which depends on K, M and the seed alone; another one draws anew. hyperbolic=True takes every w with both
    signs (M even). eps is added to the denominator; causal=False: every query sees every key.
    No maximum over keys is subtracted, as public codes do: that would look at later tokens. An exponent is at most
    |w_i|^2 / 2, so scale q and k down, as for softmax attention, before they are very long.

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state if return_state, a
    NormalisedState(S (..., H, M, V), z (..., H, M)), or S alone with normalize=False.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay NONE, erase NONE. Common options: linattn_np.Options.
    Choromanski et al., arXiv 2009.14794; la.feature_maps.favor_plus is its map.
    """
