"""Linear attention with feature maps and an optional sum normaliser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from ...call.dispatch import public
from ...matrix_state.types import Readout
from ...ops.feature_maps import feature_map_pair
from ...spec import Samples, VariantSpec
from ..shared.arguments import KEYS, QUERIES, VALUES
from ..shared.similarity import Similarity, SimilarityOptions, check_eps, defaults

SIMILARITY = Similarity(lambda c: feature_map_pair(c.name, c.options["feature_map"]))


def check_options(fn: str, options: dict[str, Any]) -> None:
    feature_map_pair(fn, options["feature_map"])
    check_eps(fn, options)


def is_plain(options: Mapping[str, Any]) -> bool:
    """Whether the state of a call is the state of the core."""
    return options["feature_map"] == "identity" and not options["normalize"]


class LinearAttentionOptions(SimilarityOptions, total=False):
    """The common options and the ones of the docstring of `linear_attention`."""

    feature_map: Any


SPEC = VariantSpec(
    name="linear_attention",
    sentence="Softmax attention's similarity replaced by an inner product of feature maps.",
    equation="S_t = S_{t-1} + phi(k_t)^T v_t;  out_t = scale phi(q_t) S_t, over phi(q_t) z_t if normalised",
    paper="Katharopoulos, Vyas, Pappas, Fleuret, arXiv 2006.16236",
    arrays={"q": QUERIES, "k": KEYS, "v": VALUES},
    change=SIMILARITY.change,
    readout=Readout.NORMALISED,
    scaled=False,
    state=replace(SIMILARITY.state, plain=is_plain),
    options={"feature_map": "identity"} | defaults(normalize=False),
    check_options=check_options,
)
SAMPLES = Samples(
    options=(
        {},
        {"feature_map": "elu+1", "normalize": True},
        {"feature_map": ("silu", "relu")},
        {"causal": False},
        {"causal": False, "feature_map": "elu+1", "normalize": True},
        *({"feature_map": name, "normalize": name != "dpfp"} for name in ("hedgehog", "dpfp")),
    )
)


@public(SPEC, SAMPLES)
def linear_attention(q: Any, k: Any, v: Any, **options: Unpack[LinearAttentionOptions]) -> Any:
    """Linear attention: softmax attention's similarity replaced by an inner product of feature maps.

        S_t = S_{t-1} + phi(k_t)^T v_t          z_t = z_{t-1} + phi(k_t)
        out_t = scale phi(q_t) S_t              normalize=True: the same / (scale phi(q_t) z_t^T + eps)

    q      (..., T, Hq, K)   queries; causal=False: (..., Tq, Hq, K), every query sees every key
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values

    feature_map: "identity", "elu+1", "relu", "silu", "exp", "t2r", "hedgehog", "dpfp", "taylor", "rebased", "favor+",
    "favor+ hyperbolic", "fourier", a pair (f, f_vjp) of functions with f(x) (..., M) and f_vjp(x, df) -> dx, or two
    of those, for q and for k; la.feature_maps makes pairs with other parameters than the names have.
    normalize=True divides by the sum of the similarities plus eps (0 where that is 0) and makes the state a
    NormalisedState(S (..., H, M, V), z (..., H, M)). causal=False: every query sees every key.
    With an identity map the sum can come near 0 and the quotient means nothing: normalise maps that are >= 0.

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state (..., H, M, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay NONE, erase NONE. Common options: linattn_np.Options.
    Katharopoulos, Vyas, Pappas, Fleuret, arXiv 2006.16236.
    """
