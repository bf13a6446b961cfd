"""Linear attention whose state decays entry by entry: the gate of a token is a matrix."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...runtime.arrays import Array, cast, shared_heads, sum_of_groups
from ...runtime.shapes import check_state
from ...spec import ArgSpec, ChangeOfVariables, StateFormat, Variables, VariantSpec
from ..shared.arguments import KEYS, LOG_DECAY, QUERIES, VALUES


def to_core(c: Variables) -> Inputs:
    """x = k^T v and g with H K V channels."""
    k, v = _heads(c, c.k), cast(c.xp, c.v, c.dtype)
    return Inputs(_flat(c, k[..., None] * v[..., None, :]), None, _flat(c, c.g))


def to_core_vjp(c: Variables, d: Inputs) -> dict[str, Array]:
    """dk = dx v^T, dv = k dx."""
    xp, dx, v = c.xp, _apart(c, d.x), cast(c.xp, c.v, c.dtype)
    dk = sum_of_groups(xp, xp.sum(dx * v[..., None, :], axis=-1), c.k.shape[-2])
    return {"k": dk, "v": xp.sum(_heads(c, c.k)[..., None] * dx, axis=-2), "g": _apart(c, d.g)}


def from_core(c: Variables, out: Array) -> Array:
    """q S"""
    return c.xp.sum(_heads(c, c.q)[..., None] * _apart(c, out), axis=-2)


def from_core_vjp(c: Variables, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """(q^T dout, dq = S dout^T)."""
    xp, dout = c.xp, cast(c.xp, dout, c.dtype)[..., None, :]
    dq = sum_of_groups(xp, xp.sum(_apart(c, out) * dout, axis=-1), c.q.shape[-2])
    return _flat(c, _heads(c, c.q)[..., None] * dout), {"q": dq}


def _heads(c: Variables, x: Array) -> Array:
    """Queries or keys of every state."""
    return shared_heads(c.xp, cast(c.xp, x, c.dtype), c.sizes.H)


def _flat(c: Variables, x: Array) -> Array:
    """(..., H, K, V) as (..., H K V)."""
    return c.xp.reshape(x, (*x.shape[:-3], c.sizes.H * c.sizes.K * c.sizes.V))


def _apart(c: Variables, x: Array) -> Array:
    """(..., H K V) as (..., H, K, V)."""
    return c.xp.reshape(x, (*x.shape[:-1], c.sizes.H, c.sizes.K, c.sizes.V))


def pack_state(c: Variables, state: Array | None) -> Array | None:
    if state is None:
        return None
    check_state(c.name, state, c.sizes)
    return _flat(c, state)


SPEC = VariantSpec(
    name="matrix_gate",
    called="Full matrix gate",
    sentence="Linear attention whose state decays entry by entry: the gate of a token is a matrix.",
    equation="S_t = e^{g_t} * S_{t-1} + k_t^T v_t;  out_t = scale q_t S_t",
    paper="Yang, Wang, Shen, Panda, Kim, GLA, arXiv 2312.06635, section 4.1",
    arrays={
        "q": QUERIES,
        "k": KEYS,
        "v": VALUES,
        "g": ArgSpec("T H K V", "log decay of every entry of the state, <= 0", limits=LOG_DECAY),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, from_core, from_core_vjp, query=None, key="k", gate="g"),
    core=CORE,
    shares_states=False,
    state=StateFormat(pack=pack_state, unpack=_apart, axes={"state": "H K V"}),
)


@public(SPEC)
def matrix_gate(q: Any, k: Any, v: Any, g: Any, **options: Unpack[Options]) -> Any:
    """Full matrix gate: linear attention whose state decays entry by entry: the gate of a token is a matrix.

        S_t = e^{g_t} * S_{t-1} + k_t^T v_t          entry by entry
        out_t = scale q_t S_t

    q      (..., T, Hq, K)     queries, for every token
    k      (..., T, Hk, K)     keys
    v      (..., T, H, V)      values
    g      (..., T, H, K, V)   log decay of every entry of the state, <= 0

    No form of it is a product of matrices: time and memory are those of T H K V numbers, as g itself.
    scale=None means K**-0.5. Returns out (..., T, H, V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Yang, Wang, Shen, Panda, Kim, GLA, arXiv 2312.06635, section 4.1.
    """
