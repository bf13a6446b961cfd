"""Types of the elementwise core: inputs and residuals."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace, as_computed
from ..runtime.pools import StateRows
from ..runtime.shapes import Sequence


class Inputs(NamedTuple):
    """Arrays of a call, or their gradients: h_t = a_t h_{t-1} + x_t, a_t = e^{g_t}. Real or complex.

    Either a or g is given; without an axis of tokens it is a constant.
    """

    x: Array  # (..., T, D)
    a: Array = None  # (..., T, D) or (D,)
    g: Array = None  # (..., T, D) or (D,), natural log

    @property
    def gate(self) -> Array:
        """a or g."""
        return self.g if self.a is None else self.a

    @property
    def is_constant(self) -> bool:
        """Whether all tokens have one gate."""
        return self.gate.ndim < self.x.ndim

    def tokens(self, start: int, stop: int) -> Inputs:
        """Tokens start..stop."""
        x, gate = self.x[..., start:stop, :], self.gate
        gate = gate if self.is_constant else gate[..., start:stop, :]
        return Inputs(x, gate) if self.g is None else Inputs(x, None, gate)

    def computed(self, xp: Namespace, dtype: Any) -> Inputs:
        """The arrays in the dtype of the computation, or in its complex one."""
        return Inputs(*(None if y is None else as_computed(xp, y, dtype) for y in self))


class Plan(NamedTuple):
    """The fields of CallPlan, and the one of this core."""

    xp: Namespace
    dtype: Any
    scale: float
    causal: bool = True
    chunk_size: int | str | None = None
    sequences: tuple[Sequence, ...] = ()
    gradients: bool = False
    gate_gradient: bool = True
    precision: str | None = None
    overwrite: bool = False
    pool_rows: StateRows | None = None
    states_at: tuple[int, ...] | None = None
    returns_state: bool = True
    has_state: bool = False
    reads_previous: bool = False  # out_t = scale h_{t-1}


class Residuals(NamedTuple):
    """Residuals of a forward pass."""

    x: Inputs
    plan: Plan
    backend: str
    state: Any
    starts: Any = None  # of the compiled loops: the states that segments of tokens begin with
