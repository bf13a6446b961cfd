"""Retention: linear attention with one fixed decay a head."""

from __future__ import annotations

from typing import Any, Unpack

from ..call import public
from ..card import Card, Given
from ..cores.kinds import Decay
from ..cores.matrix_state.inputs import Inputs
from ..ground.namespace import Array, cast, device
from ..options import Options


def published_decays(xp: Any, H: int, dtype: Any, where: Any) -> Array:
    """log(1 - 2^{-5-h}), h = 0 .. H - 1."""
    h = xp.arange(H, dtype=dtype, device=where)
    return xp.log1p(-(2.0 ** (-5.0 - h)))


def every_token(c: Any, g: Array) -> Array:
    """A decay (H,) or (H, K) of the head as the decay (T, H, 1 or K) of every token, with stride 0 over tokens."""
    xp = c.xp
    g = cast(xp, g, c.dtype)
    g = g[:, None] if g.ndim == 1 else g
    return xp.broadcast_to(g[None, :, :], (c.sizes.T, *g.shape))


def every_token_vjp(c: Any, g: Array, dg: Array) -> Array:
    """The sum over tokens, in g's shape."""
    return c.xp.reshape(c.xp.sum(dg, axis=0), g.shape)


def to_core(c: Any) -> Inputs:
    g = published_decays(c.xp, c.sizes.H, c.dtype, device(c.v)) if c.g is None else c.g
    return Inputs(c.q, c.k, c.v, every_token(c, g))


def to_core_vjp(c: Any, d: Inputs) -> dict[str, Array]:
    grads = {"q": d.q, "k": d.k, "v": d.v}
    return grads if c.g is None else grads | {"g": every_token_vjp(c, c.g, d.g)}


CARD = Card(
    name="retention",
    sentence="Linear attention with one fixed decay a head.",
    equation="S_t = diag(e^g) S_{t-1} + k_t^T v_t;  out_t = scale q_t S_t",
    paper="Sun et al., Retentive Network, arXiv 2307.08621",
    arrays={
        "q": Given("T Hq K", "normal", "queries"),
        "k": Given("T Hk K", "normal", "keys"),
        "v": Given("T H V", "normal", "values"),
        "g": Given("H|H K", "log decay", "log decay of the head, <= 0; None: log(1 - 2^{-5-h})", optional=True),
    },
    to_core=to_core,
    to_core_vjp=to_core_vjp,
    decay=Decay.SCALAR,
    gate="g",
)


@public(CARD)
def retention(q: Any, k: Any, v: Any, g: Any = None, **options: Unpack[Options]) -> Any:
    """Retention: linear attention with one fixed decay a head.

        S_t = diag(e^g) S_{t-1} + k_t^T v_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries (rotated by the caller where the model rotates them)
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    g      (H,) or (H, K)    log decay of the head, <= 0, with its gradient; None: RetNet's log(1 - 2^{-5-h})

    scale=None means K**-0.5. RetNet's row normalisers are left out: they cancel in the norm that follows there.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR (VECTOR for g (H, K)), erase NONE. Common options: linattn_np.options.Options.
    Sun et al., Retentive Network, arXiv 2307.08621.
    """
