"""Linear attention whose state decays entry by entry: the gate of a token is a matrix."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...ops.product import product
from ...ops.sums import over_rows, row_inner, sum_of_groups
from ...runtime.arrays import Array, shared_heads
from ...runtime.shapes import check_state
from ...spec import ArgSpec, Call, ChangeOfVariables, StateFormat, VariantSpec
from ..shared.arguments import KEYS, LOG_DECAY, QUERIES, VALUES


def to_core(c: Call) -> Inputs:
    """x = k^T v and g with H K V channels."""
    return Inputs(_flat(c, product(c.xp, _heads(c, c.k)[..., None], c.v[..., None, :], dtype=c.dtype)), None,
                  _flat(c, c.g))  # fmt: skip


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    """dk = dx v^T, dv = k dx."""
    xp, dx = c.xp, _apart(c, d.x)
    dk = sum_of_groups(xp, row_inner(xp, dx, c.v[..., None, :], c.dtype, _kind(c, c.k)), c.k.shape[-2])
    dv = over_rows(xp, product(xp, _heads(c, c.k)[..., None], dx, dtype=c.dtype))
    return {"k": dk, "v": dv, "g": _apart(c, d.g)}


def from_core(c: Call, out: Array) -> Array:
    """q S"""
    return over_rows(c.xp, product(c.xp, _heads(c, c.q)[..., None], _apart(c, out), dtype=c.dtype))


def from_core_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """(q^T dout, dq = S dout^T)."""
    xp, dout = c.xp, dout[..., None, :]
    dq = sum_of_groups(xp, row_inner(xp, _apart(c, out), dout, c.dtype, _kind(c, c.q)), c.q.shape[-2])
    return _flat(c, product(xp, _heads(c, c.q)[..., None], dout, dtype=c.dtype)), {"q": dq}


def _heads(c: Call, x: Array) -> Array:
    """Queries or keys of every state."""
    return shared_heads(c.xp, x, c.sizes["H"])


def _kind(c: Call, x: Array) -> Any:
    """The dtype of a gradient of x: where heads share x, that of their sum."""
    return x.dtype if x.shape[-2] == c.sizes["H"] else c.dtype


def _flat(c: Call, x: Array) -> Array:
    """(..., H, K, V) as (..., H K V)."""
    return c.xp.reshape(x, (*x.shape[:-3], c.sizes["H"] * c.sizes["K"] * c.sizes["V"]))


def _apart(c: Call, x: Array) -> Array:
    """(..., H K V) as (..., H, K, V)."""
    return c.xp.reshape(x, (*x.shape[:-1], c.sizes["H"], c.sizes["K"], c.sizes["V"]))


def pack_state(c: Call, state: Array | None) -> Array | None:
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
    change=ChangeOfVariables(
        to_core, to_core_vjp, from_core, from_core_vjp, query=None, key="k", gate="g", by_tokens=True, keeps_out=True
    ),
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
