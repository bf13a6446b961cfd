"""RWKV-4: an average of the past whose weights decay, in log space."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.readouts.log_average import AverageInputs
from ...matrix_state.types import ReadState, StabilisedState
from ...runtime.arrays import Array, cast
from ...runtime.shapes import check_state
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from ..shared.arguments import POSITIVE


def to_core(c: Call) -> AverageInputs:
    return AverageInputs(c.k, c.v, c.w, c.u)


def to_core_vjp(c: Call, d: AverageInputs) -> dict[str, Array]:
    return d._asdict()


def pack(c: Call, state: Any) -> Any:
    """The core's state (S, n, m)."""
    if state is None:
        return None
    for name, S in state._asdict().items():
        check_state(c.name, S, c.sizes, "D", f"state.{name}")
    return tuple(state)


def unpack(c: Call, state: Any) -> StabilisedState:
    return StabilisedState(*state)


def log_decays(c: Call) -> Array:
    """(T, D, 1)"""
    return c.xp.broadcast_to(-cast(c.xp, c.w, c.dtype)[:, None], (c.sizes["T"], c.sizes["D"], 1))


def log_decays_vjp(c: Call, d: Array) -> dict[str, Array]:
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
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None),
    core=CORE,
    scaled=False,
    query_reads=ReadState.PREVIOUS,
    state=StateFormat(
        StabilisedState,
        pack=pack,
        unpack=unpack,
        axes={"S": "D", "n": "D", "m": "D"},
        log_decays=(log_decays, log_decays_vjp),
    ),
)


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
