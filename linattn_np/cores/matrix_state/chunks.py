"""The chunk form in array-API calls: NumPy, CuPy, PyTorch, JAX, array-api-strict, dask.

Here sequences are cut out and results are put together; running.py, scan.py and parallel.py are three ways to bring
the state to a chunk, and one_chunk.py is what a chunk does with it. A form is chosen by the length of its own sequence:
the same sequence gives the same bits alone and among others.
"""

from __future__ import annotations

from typing import Any

from ...ground.chunk_table import chunks
from ...ground.namespace import Array, cast, device, sum_to
from . import parallel, recurrence, running, scan
from .heads import TokenBuffer, gather_states, groups, initial_state, split, split_all
from .inputs import Inputs, Plan, Saved

DEFAULT_CHUNK = 64
FEW_TOKENS = 4  # up to here the recurrence does less than the set-up of a chunk


def chunk_length(plan: Plan, T: int) -> int:
    """C; the parallel form goes in tiles of the default length."""
    C = plan.chunk_size
    return C if isinstance(C, int) and not is_parallel(plan, T) else DEFAULT_CHUNK


def is_parallel(plan: Plan, T: int) -> bool:
    """Whether a call takes the parallel form: asked for, or by a chunk that would hold all T tokens."""
    C = plan.chunk_size
    return C == "parallel" or (isinstance(C, int) and C > DEFAULT_CHUNK and C >= T)


def is_short(plan: Plan, T: int) -> bool:
    """Whether T tokens are walked one by one where the caller leaves the form open."""
    return plan.chunk_size is None and T <= FEW_TOKENS


def _walk(plan: Plan, T: int, states: str) -> Any:
    if is_short(plan, T):
        return recurrence.WALK
    return parallel if is_parallel(plan, T) else {"loop": running, "scan": scan}[states]


def forward(x: Inputs, plan: Plan, state: Array | None, states: str = "loop") -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved).   states: "loop" hands the state on, "scan" composes chunk transfers."""
    xp, G = plan.xp, groups(x)
    core, out = split_all(xp, x, G), None
    if x.q is not None:
        H = max(x.q.shape[-2], x.v.shape[-2])
        out = TokenBuffer(xp, (*x.v.shape[:-2], H, x.v.shape[-1]), x.v.dtype, device(x.v))
    ends, kept = [], []
    for sequence in plan.sequences:
        T = sequence.stop - sequence.start
        S = initial_state(core, plan, state, sequence.row, G)
        table = chunks(sequence, chunk_length(plan, T))
        S, keep = _walk(plan, T, states).forward(core, plan, table, S, out.put if out is not None else None)
        ends.append(S)
        kept.append(keep)
    return None if out is None else out.done(), gather_states(plan, ends), Saved(x, plan, state, (kept, states))


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input, in the dtype of the computation, and of the initial state."""
    x, plan, _, (kept, states) = saved
    xp, G = plan.xp, groups(x)
    core = split_all(xp, x, G)
    dcore = None if dout is None else split(xp, dout, G)
    buffers = {
        name: TokenBuffer(xp, tuple(y.shape), plan.dtype, device(x.v))
        for name, y in x._asdict().items()
        if y is not None and name != "u"
    }
    bonus: list[Array] = []

    def put(start: int, grads: dict[str, Array]) -> None:
        for name, d in grads.items():
            if name == "u":
                bonus.append(sum_to(xp, d, core.u.shape))
            else:
                buffers[name].put(start, d)

    begins = []
    for sequence, keep in zip(plan.sequences, kept, strict=True):
        T = sequence.stop - sequence.start
        dS = initial_state(core, plan, dstate, sequence.row, G)
        table = chunks(sequence, chunk_length(plan, T))
        begins.append(_walk(plan, T, states).backward(core, plan, table, keep, dcore, dS, put))
    arrays = {name: buffer.done() for name, buffer in buffers.items()}
    if x.u is not None:
        arrays["u"] = xp.reshape(sum(bonus, xp.zeros_like(cast(xp, core.u, plan.dtype))), x.u.shape)
    return Inputs(**{name: arrays.get(name) for name in Inputs._fields}), gather_states(plan, begins)
