"""SLOTS read-out: two memories of the core, a softmax over slots between them.

    W_t = W_{t-1} diag(e^{g_t}) + k_t^T s_t        p_t = softmax(scale q_t W_t)
    S_t = diag(e^{g_t}) S_{t-1} + s_t^T v_t        out_t = p_t S_t

W (K, M) holds one key per slot, S (M, V) one value. The adjoint runs in reverse order: S, softmax, W.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ...core import Explained, join_parts, register, split_parts
from ...ops.learned_maps import softmax, softmax_vjp
from ...ops.sums import added
from ...runtime.arrays import Array, cast, is_cupy
from .. import core
from ..types import Inputs, Plan

OF_KEYS, OF_VALUES = ("v",), ("q", "k")  # inputs of the memories from s and p, in the compute dtype


class SlotInputs(NamedTuple):
    """Arrays (..., T, heads, width), or their gradients."""

    q: Array  # (..., T, Hq, K)
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    s: Array  # (..., T, H, M)  write weight of each slot
    g: Array  # (..., T, H, M)  log decay of the slots

    def memories(self) -> list[Inputs]:
        """The core's inputs of the memories of keys and of values; s_t stands in for p_t, which has its shape."""
        return [Inputs(self.q, self.k, self.s, gv=self.g), Inputs(None if self.q is None else self.s, self.s, self.v,
                                                                  self.g)]  # fmt: skip


class SlotResiduals(NamedTuple):
    """Residuals of a forward pass."""

    plan: Plan
    p: Array | None
    key_residuals: Any
    value_residuals: Any


def forward(
    fn: str, x: SlotInputs, plan: Plan, state: tuple[Array, Array] | None, wanted: str | None
) -> tuple[Array | None, tuple[Array, Array], SlotResiduals]:
    """(out, (S, W) after the last token, residuals)."""
    x, (of_keys, of_values) = _stored(fn, x, plan, wanted), _plans(plan)
    S, W = (None, None) if state is None else state
    keys, values = x.memories()
    logits, W_end, key_residuals = core.forward(fn, keys, of_keys, W, wanted)
    p = None if logits is None else softmax(plan.xp, logits)
    read = None if p is None else cast(plan.xp, p, x.s.dtype)
    out, S_end, value_residuals = core.forward(fn, values._replace(q=read), of_values, S, wanted)
    return out, join_parts((S_end, W_end)), SlotResiduals(plan, p, key_residuals, value_residuals)


def backward(
    residuals: SlotResiduals, dout: Array | None, dstate: tuple[Array, Array] | None
) -> tuple[SlotInputs, tuple[Array, Array]]:
    """Gradients of every input, and of the initial (S, W)."""
    plan, p, key_residuals, value_residuals = residuals
    dS, dW = split_parts(dstate, 2)
    d, dS_0 = core.backward(value_residuals, dout, dS)
    dlogits = None
    if p is not None and dout is not None:
        dlogits = softmax_vjp(plan.xp, p, d.q, d.q.dtype)
    e, dW_0 = core.backward(key_residuals, dlogits, dW)
    ds = added(plan.xp, d.k, e.v, plan.dtype)
    return SlotInputs(e.q, e.k, d.v, ds, added(plan.xp, d.g, e.gv)), (dS_0, dW_0)


def _plans(plan: Plan) -> tuple[Plan, Plan]:
    """Those of the memories of keys and of values."""
    return plan._replace(computed=OF_KEYS), plan._replace(scale=1.0, computed=OF_VALUES)


def _stored(fn: str, x: SlotInputs, plan: Plan, wanted: str | None) -> SlotInputs:
    """With s in the compute dtype, or in that to which the kernels of both memories round it."""
    return x._replace(s=cast(plan.xp, x.s, x.k.dtype if _is_rounded(fn, x, plan, wanted) else plan.dtype))


def _is_rounded(fn: str, x: SlotInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether kernels that round all rows to the dtype of the keys compute both memories."""
    if not is_cupy(plan.xp) or any(y is None or y.dtype != x.k.dtype for y in (x.q, x.v)):
        return False
    from ..cuda import choose

    for memory, own in zip(x.memories(), _plans(plan), strict=True):
        if core.choose(fn, memory, own, wanted) is not core.CUDA:
            return False
        if any(of(memory, own) not in choose.ROUNDING for of in (choose.family_of, choose.family_of_gradients)):
            return False
    return True


def explain(fn: str, x: SlotInputs, plan: Plan, wanted: str | None) -> Explained:
    """Backend, form and operations of both memories."""
    return core.explain_memories(fn, x.memories(), plan._replace(computed=OF_KEYS + OF_VALUES), wanted)


def gives_states(fn: str, x: SlotInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether both memories return states at positions."""
    return all(core.gives_states(fn, memory, plan, wanted) for memory in x.memories())


def reads_out(residuals: SlotResiduals) -> bool:
    """Whether backward reads the output."""
    return False


def reads_end(residuals: SlotResiduals) -> bool:
    """Whether backward reads the final state."""
    return True


register(sys.modules[__name__], SlotInputs)
