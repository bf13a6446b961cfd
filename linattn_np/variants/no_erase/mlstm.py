"""mLSTM: a matrix memory with exponential input gates, read through a normaliser."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...matrix_state.readouts.averages import AveragedInputs
from ...matrix_state.types import Decay, Inputs, Readout, StabilisedState
from ...ops.averages import divide_by_most, divide_by_most_vjp, with_ones, with_sums
from ...ops.gates import log_forget, log_forget_vjp, soft_cap, soft_cap_vjp
from ...ops.product import product
from ...ops.stabiliser import Gauge, gauge, last, last_of_each, last_of_each_vjp, last_vjp
from ...ops.sums import added, difference, inner, inner_of_matrices
from ...runtime.arrays import Array, cast, device, sum_dtype
from ...runtime.constants import constant_zeros
from ...runtime.shapes import Sequence, check_state
from ...runtime.values import is_finite, is_word, shown
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import KEYS, QUERIES, VALUES
from ..shared.similarity import sums_are_apart


def _gauge(c: Call) -> Gauge:
    """log f_t and i_t in the gauge m_t = max(log f_t + m_{t-1}, i_t), computed once a call; m_0 = 0 without a state."""
    if "gauge" not in vars(c):
        xp, cap, wide = c.xp, c.options["soft_cap"], sum_dtype(c.xp, c.v)
        i, log_f = soft_cap(xp, c.i, cap, wide), log_forget(xp, c.f, cap, c.options["forget_gate"] == "exp", wide)
        state = getattr(c, "state", None)
        positions = None if c.options["chunk_size"] == 1 else c.options["return_states_at"] or ()  # None: all
        c.gauge = gauge(xp, log_f, i, _zeros(c) if state is None else state.m, c.sequences, c.dtype, positions)
    return c.gauge


def _zeros(c: Call) -> Array:
    """m_0 of a call without a state."""
    lead = c.lead
    return constant_zeros(c.xp, (*lead, c.sizes["H"]), c.dtype, device(c.v))


def to_core(c: Call) -> Inputs | AveragedInputs:
    """k, e^{i~ - m} [v, 1], g = log f + m_{t-1} - m_t: the last column of the state is n."""
    at = _gauge(c)
    if sums_are_apart(c):
        return AveragedInputs(c.q, c.k, c.v, at.decay[..., None], at.write, at.least)
    return Inputs(c.q, c.k, with_ones(c.xp, c.v, c.dtype, at.write[..., None]), at.decay[..., None])


def to_core_vjp(c: Call, d: Inputs | AveragedInputs) -> dict[str, Array]:
    """At fixed m, since outputs do not depend on it."""
    if isinstance(d, AveragedInputs):
        dlog_w = product(c.xp, _gauge(c).write, d.w, dtype=c.dtype)
        return {"q": d.q, "k": d.k, "v": d.v} | _gates_vjp(c, dlog_w, d.g[..., 0])
    xp, write, dv = c.xp, _gauge(c).write, d.v[..., :-1]
    dwrite = inner(xp, dv, c.v, d.v[..., -1], None, c.dtype)  # <d.v, [v, 1]>
    grads = {"q": d.q, "k": d.k, "v": product(xp, write[..., None], dv, dtype=c.dtype)}
    return grads | _gates_vjp(c, product(xp, write, dwrite, dtype=c.dtype), d.g[..., 0])


def _gates_vjp(c: Call, di: Array, dlog_f: Array) -> dict[str, Array]:
    """Gradients of the arrays i and f from the gradients of the log gates."""
    xp, cap, wide = c.xp, c.options["soft_cap"], sum_dtype(c.xp, c.v)
    di = soft_cap_vjp(xp, c.i, cap, di, wide, c.dtype)
    return {"i": di, "f": log_forget_vjp(xp, c.f, cap, c.options["forget_gate"] == "exp", dlog_f, wide, c.dtype)}


def from_core(c: Call, out: Array) -> Array:
    """num / max(|den|, e^{-m}), 0 where the denominator is 0."""
    return out if sums_are_apart(c) else divide_by_most(c.xp, out, _gauge(c).least)


def from_core_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """dnum = dout / denominator; where |den| is the larger, dden = -sign(den) <dnum, num> / denominator."""
    if sums_are_apart(c):
        return dout, {}
    return divide_by_most_vjp(c.xp, out, _gauge(c).least, dout, c.dtype), {}


def log_decays(c: Call) -> Array:
    """log f, by which e^m S decays."""
    return _gauge(c).a[..., None]


def log_decays_vjp(c: Call, d: Array) -> dict[str, Array]:
    return {"f": _gates_vjp(c, c.xp.zeros_like(d[..., 0]), d[..., 0])["f"]}


# the state


def pack_state(c: Call, state: Any) -> Array | None:
    """(S, n) as one (..., H, K, V + 1) state; m is the initial m_0 of the gauge."""
    if state is None:
        return None
    for name, axes in (("S", "H K V"), ("n", "H K"), ("m", "H")):
        check_state(c.name, getattr(state, name), c.sizes, axes, f"state.{name}")
    c.joined = _parts(c, state) if sums_are_apart(c) else _joined(c, state)  # pack_state_vjp reads it
    return c.joined


def _parts(c: Call, state: Any) -> tuple[Array, Array]:
    """(S, n) in the dtype of the computation."""
    return cast(c.xp, state.S, c.dtype), cast(c.xp, state.n, c.dtype)


def _joined(c: Call, state: Any) -> Array:
    """[S, n]; without tokens it is a result, which shares no memory."""
    return with_sums(c.xp, state.S, state.n, c.dtype, view=c.sizes["T"] > 0)


def unpack_state(c: Call, S: Any) -> StabilisedState:
    S, n = S if isinstance(S, tuple) else (S[..., :-1], S[..., -1])
    return StabilisedState(S, n, cast(c.xp, last(c.xp, _gauge(c), c.sequences), c.dtype))


def unpack_state_vjp(c: Call, S: Array, dstate: Any) -> tuple[Array, dict[str, Array]]:
    """The stored state is e^{-m_T} times the represented one: dm_T = dm - <dS, S> - <dn, n>, by last_vjp."""
    xp, at = c.xp, _gauge(c)
    dS = _parts(c, dstate) if isinstance(S, tuple) else _joined(c, dstate)
    dm = _dm(c, dstate.m, dS, S)
    dlog_f, di, dm_0 = last_vjp(xp, at, c.sequences, dm)
    return dS, _gates_vjp(c, di, dlog_f) | {"state": dm_0}


def unpack_states(c: Call, S: Array, prefixes: list[Sequence]) -> StabilisedState:
    return StabilisedState(S[..., :-1], S[..., -1], cast(c.xp, last_of_each(c.xp, _gauge(c), prefixes), c.dtype))


def unpack_states_vjp(c: Call, S: Array, dstates: Any, prefixes: list[Sequence]) -> tuple[Array, dict[str, Array]]:
    """As unpack_state_vjp, of every position."""
    xp, at = c.xp, _gauge(c)
    dS = _joined(c, dstates)
    dm = _dm(c, dstates.m, dS, S)
    dlog_f, di, dm_0 = last_of_each_vjp(xp, at, c.sequences, prefixes, dm)
    return dS, _gates_vjp(c, di, dlog_f) | {"state": dm_0}


def _dm(c: Call, dm: Array, dS: Any, S: Any) -> Array:
    """dm - <dS, S> of each head, in the dtype of sums."""
    d = difference(c.xp, cast(c.xp, dm, c.dtype), _inner(c.xp, dS, S, c.dtype))  # rounded as between two calls
    return cast(c.xp, d, _gauge(c).m.dtype)


def pack_state_vjp(c: Call, dS: Array, dm: Array | None) -> StabilisedState:
    """C_0 = e^{m_0} S_0, so dm_0 = <dS_0, S_0> + <dn_0, n_0>, plus the part of m_T."""
    xp = c.xp
    dm_0 = _inner(xp, dS, c.joined, c.dtype)
    dS, dn = dS if isinstance(dS, tuple) else (dS[..., :-1], dS[..., -1])
    return StabilisedState(dS, dn, dm_0 if dm is None else added(xp, dm_0, cast(xp, dm, dm_0.dtype)))


def _inner(xp: Any, dS: Any, S: Any, dtype: Any) -> Array:
    """<dS, S> of each head, or <dS, S> + <dn, n>."""
    if isinstance(S, tuple):
        return cast(xp, xp.sum(dS[0] * S[0], axis=(-2, -1)) + xp.sum(dS[1] * S[1], axis=-1), dtype)
    return inner_of_matrices(xp, dS, S, dtype)


def check_options(fn: str, options: dict[str, Any]) -> None:
    cap, gate = options["soft_cap"], options["forget_gate"]
    if cap is not None and not (is_finite(cap) and cap > 0):
        raise ValueError(f"{fn}: soft_cap is {shown(cap)}, expected None or a finite number > 0")
    options["soft_cap"] = None if cap is None else float(cap)
    if not is_word(gate, ("sigmoid", "exp")):
        raise ValueError(f"{fn}: forget_gate is {shown(gate)}, expected 'sigmoid' or 'exp'")


class MlstmOptions(Options, total=False):
    """The common options, and the functions of the gates."""

    soft_cap: float | None
    forget_gate: str


SPEC = VariantSpec(
    name="mlstm",
    called="mLSTM",
    sentence="Scalar decay with an exponential input gate, read through a normaliser that is at least 1.",
    equation="S_t = f_t S_{t-1} + e^{i_t} k_t^T v_t;  n_t = f_t n_{t-1} + e^{i_t} k_t;  "
    "out_t = scale q_t S_t / max(|scale q_t n_t^T|, 1)",
    paper="Beck et al., xLSTM, arXiv 2405.04517",
    arrays={
        "q": QUERIES,
        "k": KEYS,
        "v": VALUES,
        "i": ArgSpec("T H", "input gate: its logarithm"),
        "f": ArgSpec("T H", "forget gate before its sigmoid"),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, from_core, from_core_vjp),
    decay=Decay.SCALAR,
    readout=Readout.NORMALISED,
    state=StateFormat(
        StabilisedState,
        None,
        pack_state,
        unpack_state,
        unpack_state_vjp,
        pack_state_vjp,
        unpack_states,
        unpack_states_vjp,
        log_decays=(log_decays, log_decays_vjp),
    ),
    options={"soft_cap": None, "forget_gate": "sigmoid"},
    check_options=check_options,
)
SAMPLES = Samples({"f": "log decay"}, ({}, {"soft_cap": 1.5}, {"forget_gate": "exp"}))


@public(SPEC, SAMPLES)
def mlstm(q: Any, k: Any, v: Any, i: Any, f: Any, **options: Unpack[MlstmOptions]) -> Any:
    """mLSTM: a decaying matrix memory with exponential input gates, read through a normaliser.

        S_t = f_t S_{t-1} + e^{i_t} k_t^T v_t          f_t = sigmoid(f_t)
        n_t = f_t n_{t-1} + e^{i_t} k_t
        out_t = scale q_t S_t / max(|scale q_t n_t^T|, 1)

    q      (..., T, Hq, K)   queries
    k      (..., T, Hk, K)   keys
    v      (..., T, H, V)    values
    i      (..., T, H)       input gate: its logarithm
    f      (..., T, H)       forget gate before its sigmoid

    soft_cap=c: both gates go through c tanh(x / c) first (xLSTM-7B: 15). forget_gate="exp": e^f instead of the sigmoid.
    The state is a StabilisedState(S (..., H, K, V), n (..., H, K), m (..., H)): e^m S and e^m n are what the equations
    say, with m_t = max(log f_t + m_{t-1}, i_t), which is 0 before a first token without a state. Every exponent is then
    <= 0, and outputs do not depend on m; gradients go through the normaliser, and through m where the state is used.

    scale=None means K**-0.5. Returns out (..., T, max(Hq, H), V), and the state if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.Options.
    Beck et al., xLSTM, arXiv 2405.04517.
    """
