"""Retention: linear attention with one fixed decay per head; RetNet: with rotated queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.types import Decay, Inputs
from ...ops.sums import added, over_tokens, sum_to
from ...runtime.arrays import Array, cast, device
from ...runtime.constants import constant_array
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, VariantSpec
from ..shared.arguments import KEYS, LOG_DECAY, QUERIES, VALUES
from ..shared.projections import MappedOptions, with_feature_map
from ..shared.rotated import ROTATED_STATE, THETA, Rotated


def published_decays(xp: Any, H: int, dtype: Any, where: Any) -> Array:
    """log(1 - 2^{-5-h}), h = 0 .. H - 1."""

    def make() -> Array:
        h = xp.arange(H, dtype=dtype, device=where)
        return xp.log1p(-(2.0 ** (-5.0 - h)))

    return constant_array(xp, ("retention", H, str(dtype)), where, make)


def every_token(c: Call, g: Array) -> Array:
    """A decay (H,) or (H, K) of the head as the decay (T, H, 1 or K) of every token, with stride 0 over tokens."""
    xp = c.xp
    g = cast(xp, g, c.dtype)
    g = g[:, None] if g.ndim == 1 else g
    return xp.broadcast_to(g[None, :, :], (c.sizes["T"], *g.shape))


def every_token_vjp(c: Call, g: Array, dg: Array) -> Array:
    """The sum over tokens, in g's shape."""
    return c.xp.reshape(over_tokens(c.xp, dg, 2), g.shape)


def head_decays(c: Call) -> Array:
    """g, or the published one."""
    return published_decays(c.xp, c.sizes["H"], c.dtype, device(c.v)) if c.g is None else c.g


def to_core(c: Call) -> Inputs:
    return Inputs(c.q, c.k, c.v, every_token(c, head_decays(c)))


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    grads = {"q": d.q, "k": d.k, "v": d.v}
    return grads if c.g is None else grads | {"g": every_token_vjp(c, c.g, d.g)}


SPEC = VariantSpec(
    name="retention",
    sentence="Linear attention with one fixed decay per head.",
    equation="S_t = diag(e^g) S_{t-1} + k_t^T v_t;  out_t = scale q_t S_t",
    paper="Sun et al., Retentive Network, arXiv 2307.08621",
    arrays={
        "q": QUERIES,
        "k": KEYS,
        "v": VALUES,
        "g": ArgSpec("H|H K", "log decay of the head, <= 0; None: log(1 - 2^{-5-h})", optional=True, limits=LOG_DECAY),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, gate="g"),
    decay=Decay.SCALAR,
)


@public(with_feature_map(SPEC))
def retention(q: Any, k: Any, v: Any, g: Any = None, **options: Unpack[MappedOptions]) -> Any:
    """Retention: linear attention with one fixed decay per head.

        S_t = diag(e^g) S_{t-1} + k_t^T v_t
        out_t = scale q_t S_t

    q      (..., T, Hq, K)   queries (retnet rotates them)
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    g      (H,) or (H, K)    log decay of the head, <= 0, with its gradient; None: RetNet's log(1 - 2^{-5-h})

    feature_map: a map of q and k as in linear_attention; the state is then (..., H, M, V).
    scale=None means K**-0.5. RetNet's row normalisers are omitted: they cancel in the norm that follows.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR (VECTOR for g (H, K)), erase NONE. Common options: linattn_np.Options.
    Sun et al., Retentive Network, arXiv 2307.08621.
    """


def xpos_decays(c: Call) -> Array:
    """log zeta_p / 512 of both channels of each pair, zeta_p = (p / P + 0.4) / 1.4; 0 where K is odd: (1, K)."""
    xp, K, where = c.xp, c.sizes["K"], device(c.v)
    P = K // 2

    def make() -> Array:
        pair = xp.arange(P, dtype=c.dtype, device=where) / max(P, 1)
        both = xp.reshape(xp.stack([xp.log((pair + 0.4) / 1.4) / 512] * 2, axis=-1), (1, 2 * P))
        return xp.concat([both, xp.zeros((1, K - 2 * P), dtype=c.dtype, device=where)], axis=-1)

    return constant_array(xp, ("xpos decays", K, str(c.dtype)), where, make)


def retnet_to_core(c: Call) -> Inputs:
    """Retention's inputs; the log decay is the sum of the head's and xPos' of the channels."""
    if not c.options["xpos"]:
        return to_core(c)
    xp, shape = c.xp, (c.sizes["H"], c.sizes["K"])
    of_heads = lambda: cast(xp, head_decays(c), c.dtype)[:, None]  # noqa: E731
    if c.g is None:
        g = constant_array(xp, ("xpos", *shape, str(c.dtype)), device(c.v), lambda: of_heads() + xpos_decays(c))
    else:
        g = added(xp, *(xp.broadcast_to(y, shape) for y in (of_heads(), xpos_decays(c))))
    return Inputs(c.q, c.k, c.v, every_token(c, g))


def retnet_to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    if c.options["xpos"] and d.g is not None:
        d = d._replace(g=sum_to(c.xp, d.g, (*d.g.shape[:-1], 1)))
    return to_core_vjp(c, d)


class RetNetOptions(Options, total=False):
    """The common options, and xPos' decay of the channels."""

    xpos: bool


RETNET = replace(
    SPEC,
    name="retnet",
    called="RetNet",
    sentence="Retention whose queries and keys rotate with their position: a complex decay.",
    equation="S_t = e^g R S_{t-1} + k_t^T v_t, R rotates pairs of rows by theta;  out_t = scale q_t S_t",
    paper="Sun et al., Retentive Network, arXiv 2307.08621; xPos: Sun et al., arXiv 2212.10554",
    arrays={**SPEC.arrays, "g": replace(SPEC.arrays["g"], axes="H"), "theta": THETA},
    change=Rotated(replace(SPEC.change, to_core=retnet_to_core, to_core_vjp=retnet_to_core_vjp)).change,
    state=ROTATED_STATE,
    options={"xpos": False},
)


@public(RETNET, Samples({"theta": "angle"}, ({}, {"xpos": True})))
def retnet(q: Any, k: Any, v: Any, g: Any = None, theta: Any = None, **options: Unpack[RetNetOptions]) -> Any:
    """RetNet: retention whose queries and keys rotate with their position; a decay e^{g + i theta} of channel pairs.

        S_t = e^g R S_{t-1} + k_t^T v_t        R rotates rows (2 p, 2 p + 1) by -theta_p
        out_t = scale q_t S_t                  = sum over j <= t of e^{g (t-j)} scale q_t R^{t-j} k_j^T v_j

    q      (..., T, Hq, K)   queries, not rotated
    k      (..., T, Hk, K)   keys, not rotated
    v      (..., T, H, V)    values
    g      (H,)              log decay of the head, <= 0, with its gradient; None: RetNet's log(1 - 2^{-5-h})
    theta  (P,)              angle per token of channels (2 p, 2 p + 1), with its gradient; channels from 2 P on do not
                             rotate. None: 10000^{-linspace(0, 1, K // 2)}

    xpos=True adds xPos' log((p / P + 0.4) / 1.4) / 512 to the log decay of each pair: the growth of the queries and the
    shrinking of the keys that xPos has, taken together, so that no factor grows. The state is in the frame of the last
    token: the next call goes on without an offset. scale=None means K**-0.5.
    Returns out (..., T, max(Hq, H), V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR (VECTOR with xpos), erase NONE. Common options:
    linattn_np.Options. Sun et al., arXiv 2307.08621; xPos: Sun et al., arXiv 2212.10554.
    """
