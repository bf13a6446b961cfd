"""A gated running mean as a core: the example of docs/internals/adding_a_core.md."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, Unpack

from linattn_np.call.dispatch import public
from linattn_np.call.options import Options
from linattn_np.core import CallPlan, Computed, Core, Explained, register, register_states
from linattn_np.runtime.arrays import Array, cast, device
from linattn_np.spec import ArgSpec, Call, ChangeOfVariables, StateFormat, VariantSpec


class MeanInputs(NamedTuple):
    """Arrays, or their gradients."""

    x: Array  # (..., T, H, V)
    g: Array  # (..., T, H)


class MeanState(NamedTuple):
    """State of gated_mean: S (..., H, V), the weighted sum, and n (..., H), the sum of the weights."""

    S: Any
    n: Any


def tokens_fwd(plan: CallPlan, x: Array, g: Array, state: MeanState) -> list[MeanState]:
    """The states before the first token and after each one."""
    states = [state]
    for t in range(x.shape[-3]):
        a = plan.xp.exp(g[..., t, :])
        state = MeanState(a[..., None] * state.S + x[..., t, :, :], a * state.n + 1)
        states.append(state)
    return states


def tokens_vjp(
    plan: CallPlan, g: Array, states: list[MeanState], dout: Array | None, dstate: MeanState
) -> tuple[list[Array], list[Array], MeanState]:
    """(dx_t, dg_t, gradient of the state before the first token)."""
    xp, (dS, dn), dx, dg = plan.xp, dstate, [], []
    for t in reversed(range(g.shape[-2])):
        before, (S, n) = states[t], states[t + 1]
        if dout is not None:  # out_t = scale S_t / n_t
            d = plan.scale * dout[..., t, :, :] / n[..., None]
            dS, dn = dS + d, dn - xp.sum(d * S, axis=-1) / n
        a = xp.exp(g[..., t, :])
        dx.append(dS)
        dg.append(a * (xp.sum(dS * before.S, axis=-1) + dn * before.n))
        dS, dn = a[..., None] * dS, a * dn
    return dx[::-1], dg[::-1], MeanState(dS, dn)


class Residuals(NamedTuple):
    """Residuals of a forward pass."""

    x: MeanInputs
    plan: CallPlan
    states: list[list[MeanState]]  # of each sequence, before the first token and after each one


class GatedMean(Core):
    """S_t = e^{g_t} S_{t-1} + x_t, n_t = e^{g_t} n_{t-1} + 1, out_t = scale S_t / n_t, token by token."""

    BACKENDS = ("reference",)
    STATE_AXES = {"S": "H V", "n": "H"}  # noqa: RUF012

    def forward(self, fn: str, x: MeanInputs, plan: CallPlan, state: MeanState | None, wanted: str | None) -> Computed:
        """(out, final state, residuals)."""
        xp, x = plan.xp, MeanInputs(*(cast(plan.xp, y, plan.dtype) for y in x))
        begins = self._each(x, plan, state)
        states = [tokens_fwd(plan, x.x[..., s.start : s.stop, :, :], x.g[..., s.start : s.stop, :], begin)
                  for s, begin in zip(plan.sequences, begins, strict=True)]  # fmt: skip
        out = [plan.scale * S / n[..., None] for each in states for S, n in each[1:]]
        end = self._joined(plan, [each[-1] for each in states])
        return xp.stack(out, axis=-3) if out else x.x, end, Residuals(x, plan, states)

    def backward(self, residuals: Residuals, dout: Array | None, dstate: MeanState | None) -> tuple[Any, Any]:
        """Gradients of the inputs and of the initial state."""
        x, plan, states = residuals
        xp, dx, dg, dbegins = plan.xp, list[Array](), list[Array](), list[MeanState]()
        d = None if dout is None else cast(xp, dout, plan.dtype)
        for s, each, dend in zip(plan.sequences, states, self._each(x, plan, dstate), strict=True):
            own = None if d is None else d[..., s.start : s.stop, :, :]
            more = tokens_vjp(plan, x.g[..., s.start : s.stop, :], each, own, dend)
            dx, dg, dbegins = dx + more[0], dg + more[1], [*dbegins, more[2]]
        grads = MeanInputs(xp.stack(dx, axis=-3), xp.stack(dg, axis=-2)) if dx else x
        return grads, self._joined(plan, dbegins)

    def reads_end(self, residuals: Residuals) -> bool:
        """The final state is the last one of the residuals."""
        return True

    def explain(self, fn: str, x: MeanInputs, plan: CallPlan, wanted: str | None) -> Explained:
        """Two operations and a division for each entry of the state."""
        each = 3.0 * x.x.shape[-1]
        reason = "requested" if wanted else "the only backend"
        return Explained("reference", reason, {}, "recurrent form", None, each * prod(x.x.shape[:-1]), each)

    def draw_state(self, rng: Any, kind: Any, shapes: Any) -> MeanState:
        """The weights are positive."""
        return MeanState(rng.standard_normal(shapes["S"]), rng.uniform(0.5, 2.0, shapes["n"]))

    def _each(self, x: MeanInputs, plan: CallPlan, state: MeanState | None) -> list[MeanState]:
        """The initial state of each sequence, or its gradient, with the batch axes of x; None is zeros."""
        (*lead, _, H, V), xp = x.x.shape, plan.xp
        shapes = (*lead, H, V), (*lead, H)
        if state is None:
            zero = MeanState(*(xp.zeros(shape, dtype=plan.dtype, device=device(x.x)) for shape in shapes))
            return [zero] * len(plan.sequences)
        wide = [cast(xp, y, plan.dtype) for y in state]
        return [MeanState(*(y if s.row is None else xp.broadcast_to(y[s.row, ...], shape)
                            for y, shape in zip(wide, shapes, strict=True))) for s in plan.sequences]  # fmt: skip

    def _joined(self, plan: CallPlan, states: list[MeanState]) -> MeanState:
        """The inverse of _each: a row for each sequence of a ragged batch."""
        if plan.sequences[0].row is None:
            return states[0]
        xp = plan.xp
        return MeanState(xp.stack([xp.reshape(S, S.shape[-2:]) for S, _ in states]),
                         xp.stack([xp.reshape(n, n.shape[-1:]) for _, n in states]))  # fmt: skip


CORE = GatedMean()
register(CORE, MeanInputs)
register_states(CORE, MeanState)


def to_core(c: Call) -> MeanInputs:
    """The core's arrays are the caller's."""
    return MeanInputs(c.x, c.g)


def to_core_vjp(c: Call, d: MeanInputs) -> dict[str, Array]:
    """Gradients by public name."""
    return d._asdict()


SPEC = VariantSpec(
    name="gated_mean",
    sentence="A mean of the past whose weights decay.",
    equation="S_t = e^{g_t} S_{t-1} + x_t;  n_t = e^{g_t} n_{t-1} + 1;  out_t = scale S_t / n_t",
    paper="an exponential moving average with gates",
    arrays={"x": ArgSpec("T H V", "values"), "g": ArgSpec("T H", "log decay, <= 0")},
    change=ChangeOfVariables(to_core, to_core_vjp, query=None, key=None, value="x"),
    core=CORE,
    scaled=False,
    state=StateFormat(MeanState),
)


@public(SPEC)
def gated_mean(x: Any, g: Any, **options: Unpack[Options]) -> Any:
    """A mean of the past whose weights decay.

        S_t = e^{g_t} S_{t-1} + x_t
        n_t = e^{g_t} n_{t-1} + 1
        out_t = scale S_t / n_t

    x      (..., T, H, V)    values
    g      (..., T, H)       log decay, <= 0

    scale=None means 1. Returns out (..., T, H, V), and the MeanState if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    """
