"""Based: linear attention with the Taylor polynomial of softmax's exponential."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Readout
from ...ops.feature_maps import FeatureMap, taylor
from ...spec import Call, Samples, VariantSpec
from ..shared.arguments import KEYS, QUERIES, VALUES
from ..shared.similarity import Similarity, SimilarityOptions, check_eps, check_whole, defaults


def maps(c: Call) -> tuple[FeatureMap, FeatureMap]:
    return (taylor(c.options["order"]),) * 2


SIMILARITY = Similarity(maps)


def check_options(fn: str, options: dict[str, Any]) -> None:
    check_eps(fn, options)
    check_whole(fn, options, "order")


class BasedOptions(SimilarityOptions, total=False):
    """The options of a similarity, and the order of its polynomial."""

    order: int


SPEC = VariantSpec(
    name="based",
    sentence="Softmax attention's exponential by its Taylor polynomial.",
    equation="S_t = S_{t-1} + phi(k_t)^T v_t;  out_t = phi(q_t) S_t / phi(q_t) z_t;  "
    "phi(q) phi(k) = 1 + z + z^2 / 2, z = q k / sqrt(K)",
    paper="Arora et al., Simple linear attention language models (Based), arXiv 2402.18668",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES},
    change=replace(SIMILARITY.change, by_heads=True),
    readout=Readout.NORMALISED,
    scaled=False,
    state=SIMILARITY.state,
    options={"order": 2} | defaults(),
    check_options=check_options,
)
SAMPLES = Samples(options=({"normalize": False}, {}, {"order": 3}, {"causal": False}))


@public(SPEC, SAMPLES)
def based(q: Any, k: Any, v: Any, **options: Unpack[BasedOptions]) -> Any:
    """Based: softmax attention's exponential replaced by its Taylor polynomial, which is an inner product.

        S_t = S_{t-1} + phi(k_t)^T v_t          z_t = z_{t-1} + phi(k_t)
        out_t = scale phi(q_t) S_t / (scale phi(q_t) z_t^T + eps)        normalize=False: the numerator
        phi(q) phi(k)^T = 1 + z + z^2 / 2, z = q k / sqrt(K)

    q      (..., T, Hq, K)   queries; causal=False: (..., Tq, Hq, K), every query sees every key
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values

    order: of the polynomial. Every monomial is one feature: M = 1 + K + K (K + 1) / 2 for order 2, where a full outer
    product would have 1 + K + K^2. Polynomials of even order are positive, those of odd order are not, and normalize
    divides by what may then be 0. eps is added to the denominator; causal=False: every query sees every key. On a GPU
    order 2 of many channels in bfloat16 without states takes time quadratic in T (explain says so); with chunk_size=64
    it is linear.

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state if return_state, a
    NormalisedState(S (..., H, M, V), z (..., H, M)), or S alone with normalize=False.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay NONE, erase NONE. Common options: linattn_np.Options.
    Arora et al., arXiv 2402.18668; la.feature_maps.taylor is its map.
    """
