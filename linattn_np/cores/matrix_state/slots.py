"""SLOTS read-out: two memories of the room, a softmax over slots between them.

    W_t = W_{t-1} diag(e^{g_t}) + k_t^T s_t        p_t = softmax(scale q_t W_t)
    S_t = diag(e^{g_t}) S_{t-1} + s_t^T v_t        out_t = p_t S_t

W (K, M) holds a key for each of M slots, S (M, V) a value. The adjoint: that of S, the softmax's, that of W.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...ground.backend import Choice
from ...ground.namespace import Array
from ...pieces.learned_maps import softmax, softmax_vjp
from . import backward as room_backward
from . import choose as room_choose
from . import forward as room_forward
from .inputs import Inputs, Plan


class SlotInputs(NamedTuple):
    """Arrays (..., T, heads, width), or their gradients; None where there is none."""

    q: Array  # (..., T, Hq, K)
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    s: Array  # (..., T, H, M)  how much each slot takes of the token, in the dtype of the computation
    g: Array  # (..., T, H, M)  log decay of the slots

    def memories(self) -> list[Inputs]:
        """The room's inputs of the keys and of the values, p_t having the shape of s_t where it is not known."""
        return [Inputs(self.q, self.k, self.s, gv=self.g), Inputs(None if self.q is None else self.s, self.s, self.v,
                                                                  self.g)]  # fmt: skip


class Saved(NamedTuple):
    """What a forward pass keeps for its backward."""

    p: Array | None
    of_keys: Any
    of_values: Any


class Kept(NamedTuple):
    """The room's, so that a call looks the same from outside."""

    saved: Saved
    q: Any = True  # nothing of it is made again


def choose(fn: str, x: SlotInputs, plan: Plan, wanted: str | None) -> Choice:
    """The backend of the values' memory."""
    return room_choose(fn, x.memories()[1], plan, wanted)


def forward(
    fn: str, x: SlotInputs, plan: Plan, state: tuple[Array, Array] | None, wanted: str | None
) -> tuple[Array | None, tuple[Array, Array], Kept]:
    """(out, (S, W) after the last token, kept)."""
    S, W = (None, None) if state is None else state
    keys, values = x.memories()
    logits, W_end, of_keys = room_forward(fn, keys, plan, W, wanted)
    p = None if logits is None else softmax(plan.xp, logits)
    out, S_end, of_values = room_forward(fn, values._replace(q=p), plan._replace(scale=1.0), S, wanted)
    return out, (S_end, W_end), Kept(Saved(p, of_keys, of_values))


def backward(
    kept: Kept, dout: Array | None, dstate: tuple[Array, Array] | None
) -> tuple[SlotInputs, tuple[Array, Array]]:
    """Gradients of every input, and of the initial (S, W)."""
    p, of_keys, of_values = kept.saved
    dS, dW = (None, None) if dstate is None else dstate
    d, dS_0 = room_backward(of_values, dout, dS)
    dlogits = None
    if p is not None and dout is not None:
        dlogits = softmax_vjp(of_keys.saved.plan.xp, p, d.q)
    e, dW_0 = room_backward(of_keys, dlogits, dW)
    return SlotInputs(e.q, e.k, d.v, d.k + e.v, d.g + e.gv), (dS_0, dW_0)
