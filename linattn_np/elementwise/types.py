"""Types of the elementwise core: inputs and residuals."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace, as_computed
from ..runtime.pools import StateRows
from ..runtime.shapes import Sequence


class Inputs(NamedTuple):
    """Arrays of a call, or their gradients: h_t = a_t h_{t-1} + x_t, a_t = e^{g_t}. Real or complex.

    One of a, g and A is given; without an axis of tokens it is a constant. A are matrices of N neighbouring channels.
    """

    x: Array  # (..., T, D)
    a: Array = None  # (..., T, D) or (D,)
    g: Array = None  # (..., T, D) or (D,), natural log
    A: Array = None  # (..., T, D / N, N, N) or (D / N, N, N)

    @property
    def gate(self) -> Array:
        """a, g or A."""
        return next((y for y in self[1:] if y is not None), None)

    @property
    def block(self) -> int:
        """N, the channels that meet; 1 without matrices."""
        return 1 if self.A is None else self.A.shape[-1]

    @property
    def gate_axes(self) -> int:
        """Axes of the gate of one token."""
        return 1 if self.A is None else 3

    @property
    def is_constant(self) -> bool:
        """Whether all tokens have one gate."""
        return self.gate.ndim < self.x.ndim - 1 + self.gate_axes

    def with_gate(self, x: Array, gate: Array) -> Inputs:
        """Other inputs and gates of the same kind, or their gradients."""
        return Inputs(x, *(None if y is None else gate for y in self[1:]))

    def gates(self, gate: Array, start: int | None = None, stop: int | None = None) -> Array:
        """The gates of tokens start..stop, of all tokens if they are one."""
        return gate if self.is_constant else gate[(..., slice(start, stop), *(slice(None),) * self.gate_axes)]

    def tokens(self, start: int, stop: int) -> Inputs:
        """Tokens start..stop."""
        return self.with_gate(self.x[..., start:stop, :], self.gates(self.gate, start, stop))

    def computed(self, xp: Namespace, dtype: Any) -> Inputs:
        """The arrays in the dtype of the computation, or in its complex one."""
        return Inputs(*(None if y is None else as_computed(xp, y, dtype) for y in self))


FORMULAS = ("hgrn", "min_gru", "min_lstm", "rg_lru", "lru")  # LA_FORMULA of gates.cuh is 1, 2, ..
AVERAGE = "average"  # of values x whose logarithms of weights are y; parameters: decay, bonus (readouts/log_average.py)


class GatedInputs(NamedTuple):
    """Arrays of a call, or their gradients: a_t and u_t of h_t = a_t h_{t-1} + u_t are a formula of them."""

    formula: str
    x: Array  # (..., T, D)
    y: Array = None  # (..., T, D), the gate
    z: Array = None  # (..., T, D), the input gate
    parameters: tuple[Array, ...] = ()  # each (D,) or None

    @property
    def is_complex(self) -> bool:
        """Whether the states are complex numbers."""
        return self.formula == "lru"

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All that are given."""
        return tuple(y for y in (self.x, self.y, self.z, *self.parameters) if y is not None)


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
    neighbours: Any = None  # ranks that have the initial state, of a computation that asks for it


class Residuals(NamedTuple):
    """Residuals of a forward pass."""

    x: Any  # Inputs or GatedInputs
    plan: Plan
    backend: str
    state: Any
    starts: Any = None  # of the compiled loops: the states that segments of tokens begin with
