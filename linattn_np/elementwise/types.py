"""Types of the elementwise core: inputs and residuals."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace, as_computed, is_complex
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


class Raw(NamedTuple):
    """Arrays and options that make steps of dt and finish outputs, or gradients.

    dt <- clip(dt + dt_bias, or softplus of it, limits),   out <- (out + D x) silu(z)

    Without A dt holds beta, and kernels take the steps beta / (1 + beta |B|^2).
    """

    z: Array = None  # (..., T, D)
    D: Array = None  # (D,)
    dt_bias: Array = None  # (D,)
    soft: bool = False
    limits: tuple[float, float] = (-math.inf, math.inf)


class SelectiveInputs(NamedTuple):
    """Arrays of a selective scan, or their gradients. A, B and C may be complex. raw: the kernels make dt and outputs.

    No A: the decays are 1 - dt B^2.

    Of a constant system (readouts/diagonal.py) dt is None, and B and C are (D, N).
    """

    x: Array  # (..., T, D)
    dt: Array  # (..., T, D)
    A: Array  # (D, N)
    B: Array  # (..., T, N)
    C: Array  # (..., T, N)
    raw: Raw | None = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All that are given."""
        return tuple(y for y in (*self[:5], *(() if self.raw is None else self.raw[:3])) if y is not None)

    @property
    def channels(self) -> tuple[int, int]:
        """(D, N), of a state."""
        return self.x.shape[-1], self.B.shape[-1]

    @property
    def is_complex(self) -> bool:
        return any(y is not None and is_complex(y) for y in (self.A, self.B, self.C))

    def tokens(self, start: int, stop: int) -> SelectiveInputs:
        """Tokens start..stop."""
        x, dt, A, B, C = self[:5]
        own = lambda y: y[..., start:stop, :]  # noqa: E731
        return SelectiveInputs(own(x), own(dt), A, own(B), own(C))


class SystemInputs(NamedTuple):
    """Arrays of a constant system, or their gradients. A is complex, B and C may be.

    held: log steps (D,), log rates and angles (D, N) of a zero-order hold (ops/zero_order_hold.py), of which kernels
    make A and B, which are None.
    """

    x: Array  # (..., T, D)
    A: Array  # (D, N), log factors
    B: Array  # (D, N)
    C: Array  # (D, N)
    D: Array = None  # (D,), skip connection, if compiled code computes the call
    held: tuple[Array, ...] | None = None

    @property
    def selective(self) -> SelectiveInputs:
        """As those of the selective scan, with steps of 1."""
        return SelectiveInputs(self.x, None, *self[1:4], None if self.D is None else Raw(D=self.D))


class AverageInputs(NamedTuple):
    """Arrays of an average (readouts/log_average.py), or their gradients."""

    k: Array  # (..., T, D)
    v: Array  # (..., T, D)
    w: Array  # (D,)
    u: Array  # (D,)


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
