"""Linear attention with feature maps and an optional sum normaliser."""

from __future__ import annotations

import math
import numbers
from typing import Any, Unpack

from ..call import public
from ..card import Card, Given
from ..cores.kinds import NormalisedState, Readout
from ..cores.matrix_state.inputs import Inputs
from ..ground.namespace import Array, cast, device
from ..ground.shapes import check_state
from ..options import Options
from ..pieces.feature_maps import feature_map_pair, identity


def _maps(c: Any) -> Any:
    return feature_map_pair(c.name, c.options["feature_map"])


def to_core(c: Any) -> Inputs:
    """phi(q), phi(k), v; with a normaliser v gains a column of ones, so that the last column of q S is q z."""
    xp, (map_q, map_k) = c.xp, _maps(c)
    v = c.v
    if c.options["normalize"]:
        v = cast(xp, v, c.dtype)
        v = xp.concat([v, xp.ones((*v.shape[:-1], 1), dtype=v.dtype, device=device(v))], axis=-1)
    k = _mapped(c, "k", map_k)
    q = None if c.q is None else _mapped(c, "q", map_q)
    if q is not None and q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{c.name}: feature_map makes q {q.shape[-1]} and k {k.shape[-1]} wide, expected one width")
    return Inputs(q, k, v)


def _mapped(c: Any, name: str, feature_map: Any) -> Array:
    x = getattr(c, name)
    if feature_map[0] is identity:  # as it is: 16-bit elements stay so
        return x
    y = feature_map[0](cast(c.xp, x, c.dtype))
    if tuple(y.shape[:-1]) != tuple(x.shape[:-1]):
        raise ValueError(f"{c.name}: feature_map makes {name} of shape {tuple(x.shape)} one of {tuple(y.shape)}, "
                         "expected all axes but the last to stay")
    return y


def to_core_vjp(c: Any, d: Inputs) -> dict[str, Array]:
    map_q, map_k = _maps(c)
    grads = {"k": _mapped_vjp(c, c.k, map_k, d.k), "v": d.v[..., : c.v.shape[-1]]}
    if c.q is not None:
        grads["q"] = _mapped_vjp(c, c.q, map_q, d.q)
    return grads


def _mapped_vjp(c: Any, x: Array, feature_map: Any, d: Array) -> Array:
    return d if feature_map[0] is identity else feature_map[1](cast(c.xp, x, c.dtype), d)


def from_core(c: Any, out: Array) -> Array:
    """Numerator over denominator + eps; 0 where no key answers."""
    if not c.options["normalize"]:
        return out
    num, den = out[..., :-1], _denominator(c, out)
    return c.xp.where(den == 0, c.xp.zeros_like(num), num / c.xp.where(den == 0, c.xp.ones_like(den), den))


def from_core_vjp(c: Any, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """d num = dout / den, d den = -<dout, num / den> / den."""
    if not c.options["normalize"]:
        return dout, {}
    xp, den = c.xp, _denominator(c, out)
    dout = cast(xp, dout, c.dtype)
    safe = xp.where(den == 0, xp.ones_like(den), den)
    dnum = xp.where(den == 0, xp.zeros_like(dout), dout / safe)
    dden = -xp.sum(dnum * out[..., :-1] / safe, axis=-1, keepdims=True)
    return xp.concat([dnum, dden], axis=-1), {}


def _denominator(c: Any, out: Array) -> Array:
    return out[..., -1:] + c.options["eps"]


def pack_state(c: Any, state: Any) -> Array | None:
    """(S, z) as one (..., H, M, V + 1) state; M is the width of the mapped keys."""
    if state is None:
        return None
    if not c.options["normalize"]:
        _check(c, state)
        return state
    if not isinstance(state, NormalisedState):
        raise TypeError(f"{c.name}: state is a {type(state).__qualname__}, expected (S, z) as a NormalisedState "
                        "with normalize=True")
    _check(c, state.S, "state.S")
    _check(c, state.z, "state.z", "H M")
    S, z = cast(c.xp, state.S, c.dtype), cast(c.xp, state.z, c.dtype)
    return c.xp.concat([S, z[..., None]], axis=-1)


def _check(c: Any, state: Array, name: str = "state", spec: str = "H M V") -> None:
    if "M" not in c.sizes.letters:  # the width that the keys have after their map
        c.sizes.letters["M"] = int(_maps(c)[1][0](c.k[..., :0, :, :]).shape[-1])
    check_state(c.name, state, c.sizes, spec, name)


def unpack_state(c: Any, S: Array) -> Any:
    return NormalisedState(S[..., :-1], S[..., -1]) if c.options["normalize"] else S


def check_options(fn: str, options: dict[str, Any]) -> None:
    feature_map_pair(fn, options["feature_map"])
    eps = options["eps"]
    if not isinstance(eps, numbers.Real) or isinstance(eps, bool) or not 0 <= float(eps) < math.inf:
        raise ValueError(f"{fn}: eps is {eps!r}, expected a finite number >= 0")


class LinearAttentionOptions(Options, total=False):
    """The common options, and: see the function's docstring."""

    feature_map: Any
    normalize: bool
    causal: bool
    eps: float


CARD = Card(
    name="linear_attention",
    sentence="Softmax attention's similarity replaced by an inner product of feature maps.",
    equation="S_t = S_{t-1} + phi(k_t)^T v_t;  out_t = scale phi(q_t) S_t, over phi(q_t) z_t if normalised",
    paper="Katharopoulos, Vyas, Pappas, Fleuret, arXiv 2006.16236",
    arrays={
        "q": Given("T Hq K", "normal", "queries"),
        "k": Given("T Hk K", "normal", "keys"),
        "v": Given("T H V", "normal", "values"),
    },
    to_core=to_core,
    to_core_vjp=to_core_vjp,
    readout=Readout.NORMALISED,
    scaled=False,
    options={"feature_map": "identity", "normalize": False, "causal": True, "eps": 0.0},
    check_options=check_options,
    from_core=from_core,
    from_core_vjp=from_core_vjp,
    pack_state=pack_state,
    unpack_state=unpack_state,
    examples=(
        {},
        {"feature_map": "elu+1", "normalize": True},
        {"feature_map": ("silu", "relu")},
        {"causal": False},
        {"causal": False, "feature_map": "elu+1", "normalize": True},
    ),
)


@public(CARD)
def linear_attention(q: Any, k: Any, v: Any, **options: Unpack[LinearAttentionOptions]) -> Any:
    """Linear attention: softmax attention's similarity replaced by an inner product of feature maps.

        S_t = S_{t-1} + phi(k_t)^T v_t          z_t = z_{t-1} + phi(k_t)
        out_t = scale phi(q_t) S_t              normalize=True: the same / (scale phi(q_t) z_t^T + eps)

    q      (..., T, Hq, K)   queries; causal=False: (..., Tq, Hq, K), every query sees every key
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values

    feature_map: "identity", "elu+1", "relu", "silu", a pair (f, f_vjp) of functions with f(x) (..., M) and
    f_vjp(x, df) -> dx, or two of those, for q and for k. normalize=True divides by the sum of the similarities
    (0 where that sum is 0) and makes the state a NormalisedState(S (..., H, M, V), z (..., H, M)).
    With an identity map the sum can come near 0 and the quotient means nothing: normalise maps that are >= 0.

    scale=None means 1. Returns out (..., T, max(Hq, H), V), and the state (..., H, M, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay NONE, erase NONE. Common options: linattn_np.options.Options.
    Katharopoulos, Vyas, Pappas, Fleuret, arXiv 2006.16236.
    """
