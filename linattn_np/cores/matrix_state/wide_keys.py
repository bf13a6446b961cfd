"""Keys wider than a backend holds, cut along their channels: without an erase these never meet.

    q S = sum over blocks b of q_b S_b,        S_b = diag(e^{g_b}) S_b + k_b^T v

Every block is a call of its own. Outputs add up, in the dtype of the computation and in the order of the blocks; so do
the gradients of v, gv and of a scalar decay, while those of q, k, of a vector decay, of the bonus and of the states lie
side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...ground.namespace import Array, cast
from ..kinds import Decay, Erase
from .inputs import Inputs, Plan, Saved


class Parts(NamedTuple):
    """What the calls of the blocks keep."""

    saved: list[Saved]


class Split:
    """A backend module whose keys may be wider than `most` where nothing is erased."""

    def __init__(self, module: Any, most: int):
        self.module, self.most = module, most

    def cuts(self, x: Inputs) -> list[slice]:
        """The blocks of channels; one where the module takes the call as it is."""
        K = x.k.shape[-1]
        if self.most >= K or x.erase is not Erase.NONE:
            return [slice(0, K)]
        count = -(-K // self.most)
        each = -(-K // count)
        each += -each % 8 if each + (-each % 8) <= self.most else 0  # whole vectors
        return [slice(n, min(n + each, K)) for n in range(0, K, each)]

    def refuses(self, call: Any) -> str | None:
        """Why the module covers no block; None where it covers all."""
        return self.module.refuses(call._replace(x=part(call.x, self.cuts(call.x)[0])))

    def how(self, call: Any) -> str:
        """In words."""
        cuts = self.cuts(call.x)
        words = self.module.how(call._replace(x=part(call.x, cuts[0])))
        return words if len(cuts) == 1 else f"{words}; keys of {call.x.k.shape[-1]} channels in {len(cuts)} blocks"

    def forward(self, x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
        """(out, final state, saved)."""
        cuts = self.cuts(x)
        if len(cuts) == 1:
            return self.module.forward(x, plan, state)
        xp, wide = plan.xp, x._replace(v=cast(plan.xp, x.v, plan.dtype))
        plan = plan._replace(overwrite=False, watched=False)
        found = [self.module.forward(part(wide, c), plan, None if state is None else state[..., c, :]) for c in cuts]
        out = None
        for one, _, _ in found:
            out = one if out is None else out + one
        end = xp.concat([end for _, end, _ in found], axis=-2)
        saved = Saved(x, plan, state, Parts([saved for _, _, saved in found]))
        return None if out is None else cast(xp, out, x.v.dtype), end, saved

    def backward(self, saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
        """Gradients of every input and of the initial state."""
        if not isinstance(saved.starts, Parts):
            return self.module.backward(saved, dout, dstate)
        xp, x = saved.plan.xp, saved.x
        found = [self.module.backward(one, dout, None if dstate is None else dstate[..., c, :])
                 for one, c in zip(saved.starts.saved, self.cuts(x), strict=True)]  # fmt: skip
        grads = {}
        for name, y in x._asdict().items():
            parts = [getattr(d, name) for d, _ in found]
            if y is None or parts[0] is None:
                continue
            beside = name in ("q", "k", "u") or (name == "g" and x.decay is Decay.VECTOR)
            grads[name] = xp.concat(parts, axis=-1) if beside else sum(parts[1:], parts[0])
        return Inputs(**{n: grads.get(n) for n in Inputs._fields}), xp.concat([dS for _, dS in found], axis=-2)


def part(x: Inputs, channels: slice) -> Inputs:
    """The call of a block of channels."""
    if channels == slice(0, x.k.shape[-1]):
        return x
    cut = {n: y[..., channels] for n, y in x._asdict().items()
           if n in ("q", "k", "u") and y is not None}  # fmt: skip
    if x.decay is Decay.VECTOR:
        cut["g"] = x.g[..., channels]
    return x._replace(**cut)
