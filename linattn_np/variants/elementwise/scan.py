"""The linear recurrence itself: factors a, or their logarithms, real or complex."""

from __future__ import annotations

from typing import Any, Unpack

from ...call.dispatch import public
from ...call.options import Options
from ...elementwise.core import CORE
from ...elementwise.types import Inputs
from ...runtime.arrays import Array
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec


def to_core(c: Call) -> Inputs:
    """The core's arrays are the caller's."""
    return Inputs(c.x, None, c.a) if c.options["log"] else Inputs(c.x, c.a)


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    """Gradients by public name."""
    return {"a": d.gate, "x": d.x}


class ScanOptions(Options, total=False):
    """The common options, and whether a is given as its logarithm."""

    log: bool


SPEC = VariantSpec(
    name="scan",
    sentence="The linear recurrence of every channel by itself, real or complex.",
    equation="h_t = a_t h_{t-1} + x_t;  out_t = scale h_t",
    paper="Blelloch, Prefix sums and their applications, CMU-CS-90-190",
    arrays={
        "a": ArgSpec("T D|D", "factors, or with log=True their logarithms", is_complex=True),
        "x": ArgSpec("T D", "inputs", is_complex=True),
    },
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="x"),
    core=CORE,
    scaled=False,
    state=StateFormat(is_complex=True),
    options={"log": False},
)
SAMPLES = Samples({"a": "factor"}, ({}, {"log": True}))


@public(SPEC, SAMPLES)
def scan(a: Any, x: Any, **options: Unpack[ScanOptions]) -> Any:
    """The linear recurrence of every channel by itself, real or complex.

        h_t = a_t h_{t-1} + x_t
        out_t = scale h_t

    a      (..., T, D)       factors, or with log=True their logarithms; (D,): the same for all tokens
    x      (..., T, D)       inputs

    Any a is exact: 0 (a hard reset; with log=True -inf), negative numbers, numbers over 1. Arrays may be complex; out
    and state are complex if anything is, and gradients of complex arrays are dRe + i dIm. Axes behind the tokens are
    one axis D: reshape others. `block_scan` has matrices of channels that meet. scale=None means 1.
    Returns out (..., T, D), and the state (..., D) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: elementwise. Common options: linattn_np.Options.
    Blelloch, Prefix sums and their applications, CMU-CS-90-190.
    """
