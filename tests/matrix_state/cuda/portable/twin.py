"""A twin of the portable chunks of a vector decay (cuda_src/vector_portable) in NumPy: token by token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from linattn_np.matrix_state.cuda.arguments import VECTOR_PORTABLE
from tests.matrix_state.cuda.recurrence import twin


class Call(twin.Call):
    """The arguments of a launch, by name; a free term is not there."""

    def __init__(self, constants, arguments):
        no_rows = {"data": 0, "batch": 0, "token": 0, "head": 0, "group": 1}
        nothing = dict.fromkeys(("a", "b", "da", "db"), no_rows)
        self.c = SimpleNamespace(**dict(constants))
        self.a = SimpleNamespace(**nothing | VECTOR_PORTABLE.unpack(arguments))


def run(entry, constants, arguments, blocks):
    """One launch."""
    call = Call(constants, arguments)
    parts = -(-(call.c.LA_V if entry == "values" else call.c.LA_K) // (16 * call.c.LA_WARPS))
    assert blocks % (parts * call.a.heads) == 0
    which = {"values": (forward, twin._values_back), "channels": (twin._reads, twin._writes)}[entry][call.c.LA_BACK]
    for slot in range(blocks // parts):
        n, head = divmod(slot, call.a.heads)
        which(call, n, head, slot, given(call, n, head))


def given(call, n, head):
    """All that a pass reads, in float64; without a cotangent zeros."""
    if not call.a.dout["data"]:
        x, call.a.dout = call.a.dout, call.a.v
        found = call.given(n, head)
        call.a.dout = x
        return found
    return call.given(n, head)


def forward(call, n, head, slot, x):
    c, S = call.c, twin._first(call, slot)
    out = call.rows("out", n, head, c.LA_V, c.LA_DTYPE)
    beta = call.rows("beta", n, head, 1, 2) if c.LA_ERASE else None
    for t in range(len(out)):
        own = (x.q[t] * x.u * x.k[t]).sum() if c.LA_BONUS else 0
        before, S = S, x.e[t][:, None] * S
        written = beta[t].astype(np.float64) * (x.v[t] - x.k[t] @ S) if c.LA_ERASE else x.v[t]
        S = S + np.outer(x.k[t], written)
        out[t] = call.a.scale * (x.q[t] @ (before if c.LA_BEFORE else S) + own * x.v[t])
    call.state(call.a.end, slot)[:] = S
