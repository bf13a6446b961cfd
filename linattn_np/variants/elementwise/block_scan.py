"""The linear recurrence of short vectors: a token multiplies each by a matrix."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...ops.parts import from_parts
from ...runtime.arrays import Array, is_complex
from ...runtime.shapes import check_state
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec


def to_core(c: Call) -> Inputs:
    """Vectors side by side are the core's channels, complex if the states are."""
    x, S = c.x, c.given_state
    if S is not None and is_complex(S) and not is_complex(x):
        x = from_parts(c.xp, x, None, c.dtype)
    return Inputs(_flat(c, x), A=c.a)


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    return {"a": d.A, "x": _apart(c, d.x)}


def from_core(c: Call, out: Array) -> Array:
    return _apart(c, out)


def from_core_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    return _flat(c, dout), {}


def _flat(c: Call, y: Array) -> Array:
    """(..., H, N) as (..., H N)."""
    return c.xp.reshape(y, (*y.shape[:-2], y.shape[-2] * y.shape[-1]))


def _apart(c: Call, y: Array) -> Array:
    """The inverse."""
    return c.xp.reshape(y, (*y.shape[:-1], *c.x.shape[-2:]))


def pack(c: Call, state: Any) -> Any:
    if state is None:
        return None
    check_state(c.name, state, c.sizes, "H N", complex=True)
    return _flat(c, state)


SPEC = VariantSpec(
    name="block_scan",
    sentence="The linear recurrence of short vectors, each multiplied by a matrix of the token.",
    equation="S_t = S_{t-1} a_t^T + x_t;  out_t = scale S_t",
    paper="Blelloch, Prefix sums and their applications, CMU-CS-90-190",
    arrays={
        "a": ArgSpec("T H N N|H N N", "matrices: S_t[h, i] takes a_t[h, i, j] S_{t-1}[h, j]", is_complex=True),
        "x": ArgSpec("T H N", "inputs", is_complex=True),
    },
    change=ChangeOfVariables(
        to_core, to_core_vjp, from_core, from_core_vjp, query=None, key=None, value="x", linear=False
    ),  # a token's weight in a later one is a matrix
    core=CORE,
    scaled=False,
    state=StateFormat(pack=pack, unpack=_apart, axes={"state": "H N"}, is_complex=True, stacks=True),
)


@public(SPEC, Samples({"a": "block"}))
def block_scan(a: Any, x: Any, **options: Unpack[Options]) -> Any:
    """The linear recurrence of short vectors, each multiplied by a matrix of the token.

        S_t = S_{t-1} a_t^T + x_t              S_t[h, i] = sum_j a_t[h, i, j] S_{t-1}[h, j] + x_t[h, i]
        out_t = scale S_t

    a      (..., T, H, N, N)   matrices; (H, N, N): the same for all tokens
    x      (..., T, H, N)      inputs: H vectors of N numbers a token

    N = 2: sections of filters of second order, rotations that decay. Arrays may be complex; out and state are complex
    if anything is, and gradients of complex arrays are dRe + i dIm. scale=None means 1.
    Returns out (..., T, H, N), and the state (..., H, N) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Blelloch, Prefix sums and their applications, CMU-CS-90-190.
    """
