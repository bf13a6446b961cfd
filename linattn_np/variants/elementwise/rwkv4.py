"""RWKV-4: an average of the past whose weights decay, in log space."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...matrix_state.types import ReadState, StabilisedState
from ...ops.stabiliser import Gauge, delayed, gauge, joined, last, last_of_each, last_of_each_vjp, last_vjp, row
from ...runtime.arrays import Array, cast, device, over_tokens, sum_dtype
from ...runtime.shapes import Sequence, check_state
from ...spec import ArgSpec, ChangeOfVariables, Samples, StateFormat, Variables, VariantSpec
from ..shared.arguments import POSITIVE

NOTHING = -1.0e30  # m without a token: e^m is 0, and a number less m is one


def _gauge(c: Variables) -> Gauge:
    """-w and k_t in the gauge m_t = max(m_{t-1} - w, k_t), computed once a call."""
    if "gauge" not in vars(c):
        xp, wide = c.xp, sum_dtype(c.xp, c.v)
        k = cast(xp, c.k, wide)
        a = xp.broadcast_to(-cast(xp, c.w, wide), k.shape)
        state, positions = getattr(c, "state", None), c.options["return_states_at"] or ()
        c.gauge = gauge(xp, a, k, _nothing(c) if state is None else state.m, c.sequences, c.dtype, positions)
    return c.gauge


def _nothing(c: Variables) -> Array:
    """m_0 of a call without a state."""
    lead = c.sizes.batch if c.sizes.ragged is None else (c.sizes.ragged,)
    return c.xp.full((*lead, c.sizes.D), NOTHING, dtype=c.dtype, device=device(c.v))


def _both(c: Variables, x: Array, y: Array) -> Array:
    return c.xp.concat([cast(c.xp, x, c.dtype), cast(c.xp, y, c.dtype)], axis=-1)


def to_core(c: Variables) -> Inputs:
    """The sums of e^k v and of e^k side by side: x = e^{k - m} [v, 1], g = m_{t-1} - w - m_t."""
    at = _gauge(c)
    return Inputs(_both(c, at.write * cast(c.xp, c.v, c.dtype), at.write), None, _both(c, at.decay, at.decay))


def to_core_vjp(c: Variables, d: Inputs) -> dict[str, Array]:
    """At fixed m, since outputs do not depend on it."""
    D, write = c.v.shape[-1], _gauge(c).write
    dk = write * (d.x[..., :D] * cast(c.xp, c.v, c.dtype) + d.x[..., D:])
    return {"v": write * d.x[..., :D], "k": dk, "w": -over_tokens(c.xp, d.g[..., :D] + d.g[..., D:])}


class Read(NamedTuple):
    """The weights of the past and of the token itself, in a gauge of their own, and the sums that they are of."""

    past: Array  # e^{m_{t-1} - n_t}
    own: Array  # e^{u + k_t - n_t}
    values: Array
    total: Array


def _read(c: Variables, out: Array) -> Read:
    """n_t = max(m_{t-1}, u + k_t)"""
    xp, at, D = c.xp, _gauge(c), c.v.shape[-1]
    before = joined(xp, [delayed(xp, at.m[..., s.start : s.stop, :], cast(xp, row(at.m_0, s), at.m.dtype))
                         for s in c.sequences])  # fmt: skip
    own = cast(xp, c.u, before.dtype) + cast(xp, c.k, before.dtype)
    n = xp.maximum(before, own)
    past, own = (cast(xp, xp.exp(y - n), c.dtype) for y in (before, own))
    return Read(past, own, past * out[..., :D] + own * cast(xp, c.v, c.dtype), past * out[..., D:] + own)


def from_core(c: Variables, out: Array) -> Array:
    """The average of the past and of the token itself."""
    at = _read(c, out)
    return at.values / at.total


def from_core_vjp(c: Variables, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """dvalues = dout / total, dtotal = -dout average / total"""
    at = _read(c, out)
    dvalues = cast(c.xp, dout, c.dtype) / at.total
    dtotal = -dvalues * (at.values / at.total)
    down = at.own * (dvalues * cast(c.xp, c.v, c.dtype) + dtotal)
    grads = {"v": at.own * dvalues, "k": down, "u": over_tokens(c.xp, down)}
    return _both(c, at.past * dvalues, at.past * dtotal), grads


# the state: S and n are e^{-m} times the sums


def pack_state(c: Variables, state: Any) -> Array | None:
    """[S, n] as one (..., 2 D) state; m is the initial m_0 of the gauge."""
    if state is None:
        return None
    if not isinstance(state, StabilisedState):
        raise TypeError(f"{c.name}: state is a {type(state).__qualname__}, expected (S, n, m) as a StabilisedState")
    for name, S in state._asdict().items():
        check_state(c.name, S, c.sizes, "D", f"state.{name}")
    return _both(c, state.S, state.n)


def pack_state_vjp(c: Variables, dS: Array, dm: Array | None) -> StabilisedState:
    """The sums are e^{m_0} S_0 and e^{m_0} n_0: dm_0 = dS_0 S_0 + dn_0 n_0, plus the part of m_T."""
    D, state = c.v.shape[-1], c.state
    both = dS * _both(c, state.S, state.n)
    dm_0 = both[..., :D] + both[..., D:]
    return StabilisedState(dS[..., :D], dS[..., D:], dm_0 if dm is None else dm_0 + cast(c.xp, dm, dm_0.dtype))


def unpack_state(c: Variables, S: Array) -> StabilisedState:
    """S, n, and m of the last token."""
    D = c.v.shape[-1]
    return StabilisedState(S[..., :D], S[..., D:], cast(c.xp, last(c.xp, _gauge(c), c.sequences), c.dtype))


def unpack_state_vjp(c: Variables, S: Array, dstate: Any) -> tuple[Array, dict[str, Array]]:
    """S and n are e^{-m_T} times the sums: dm_T = dm - dS S - dn n."""
    dS, dm = _of_parts(c, S, dstate)
    return dS, _of_maxima(c, *last_vjp(c.xp, _gauge(c), c.sequences, cast(c.xp, dm, _gauge(c).m.dtype)))


def unpack_states(c: Variables, S: Array, prefixes: list[Sequence]) -> StabilisedState:
    """Of every position."""
    D = c.v.shape[-1]
    return StabilisedState(S[..., :D], S[..., D:], cast(c.xp, last_of_each(c.xp, _gauge(c), prefixes), c.dtype))


def unpack_states_vjp(c: Variables, S: Array, dstates: Any, prefixes: list[Sequence]) -> tuple[Array, dict[str, Array]]:
    """As unpack_state_vjp, of every position."""
    (dS, dm), at = _of_parts(c, S, dstates), _gauge(c)
    return dS, _of_maxima(c, *last_of_each_vjp(c.xp, at, c.sequences, prefixes, cast(c.xp, dm, at.m.dtype)))


def _of_parts(c: Variables, S: Array, d: Any) -> tuple[Array, Array]:
    """(gradient of [S, n], of m)."""
    D, dS = c.v.shape[-1], _both(c, d.S, d.n)
    both = dS * S
    return dS, cast(c.xp, d.m, c.dtype) - both[..., :D] - both[..., D:]


def _of_maxima(c: Variables, da: Array, dk: Array, dm_0: Array) -> dict[str, Array]:
    """Gradients by name from those of the log gates."""
    return {"k": cast(c.xp, dk, c.dtype), "w": -cast(c.xp, over_tokens(c.xp, da), c.dtype), "state": dm_0}


def log_decays(c: Variables) -> Array:
    """(T, D, 1)"""
    return c.xp.broadcast_to(-cast(c.xp, c.w, c.dtype)[:, None], (c.sizes.T, c.sizes.D, 1))


def log_decays_vjp(c: Variables, d: Array) -> dict[str, Array]:
    return {"w": -c.xp.sum(d[..., 0], axis=0)}


SPEC = VariantSpec(
    name="rwkv4",
    called="RWKV-4",
    sentence="An average of the past whose weights decay, and of the token itself with a bonus, in log space.",
    equation="S_t = e^{-w} S_{t-1} + e^{k_t} v_t;  n_t = e^{-w} n_{t-1} + e^{k_t};  "
    "out_t = (scale S_{t-1} + e^{u + k_t} v_t) / (scale n_{t-1} + e^{u + k_t})",
    paper="Peng et al., RWKV, arXiv 2305.13048",
    arrays={
        "k": ArgSpec("T D", "keys: logarithms of weights"),
        "v": ArgSpec("T D", "values"),
        "w": ArgSpec("D", "rate of decay, >= 0", limits=POSITIVE),
        "u": ArgSpec("D", "bonus of the token itself"),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, from_core, from_core_vjp, query=None, key=None),
    core=CORE,
    scaled=False,
    query_reads=ReadState.PREVIOUS,
    state=StateFormat(
        StabilisedState, None, pack_state, unpack_state, unpack_state_vjp, pack_state_vjp, unpack_states,
        unpack_states_vjp, axes={"S": "D", "n": "D", "m": "D"}, log_decays=(log_decays, log_decays_vjp),
    ),
)  # fmt: skip


@public(SPEC, Samples({"w": "positive"}))
def rwkv4(k: Any, v: Any, w: Any, u: Any, **options: Unpack[Options]) -> Any:
    """RWKV-4: an average of the past whose weights decay, and of the token itself with a bonus, in log space.

        S_t = e^{-w} S_{t-1} + e^{k_t} v_t
        n_t = e^{-w} n_{t-1} + e^{k_t}
        out_t = (scale S_{t-1} + e^{u + k_t} v_t) / (scale n_{t-1} + e^{u + k_t})

    k      (..., T, D)   keys: logarithms of weights, of any size
    v      (..., T, D)   values
    w      (D,)          rate of decay, >= 0 (a layer: e^{time_decay})
    u      (D,)          bonus of the token itself

    The state is a StabilisedState of three arrays (..., D): e^m S and e^m n are the sums of the equations, with
    m_t = max(m_{t-1} - w, k_t), which is -1e30 before a first token without a state. Every exponent is then <= 0, and
    outputs do not depend on m. scale=None means 1.
    Returns out (..., T, D), and the state if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Peng et al., RWKV, arXiv 2305.13048.
    """
