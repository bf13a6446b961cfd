"""The chunk form in array-API calls: NumPy, CuPy, PyTorch, JAX, array-api-strict, dask.

Here sequences are cut out and results are put together; running.py, scan.py and parallel.py are three ways to bring
the state to a chunk, and one_chunk.py is what a chunk does with it. A form is chosen by the length of its own sequence:
the same sequence gives the same bits alone and among others.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import array_api_compat as compat

from ...ground.chunk_table import Chunk, Sequence, chunks
from ...ground.namespace import Array, cast, device, sum_to
from . import parallel, recurrence, running, scan
from .blocks import Block, assemble, blocks_of, cut, cut_all, run
from .heads import TokenBuffer, gather_states, groups, initial_state, split, split_all
from .inputs import Inputs, Plan, Saved

DEFAULT_CHUNK = 64
NUMPY_CHUNK = 32  # on a CPU the work that grows with the square of the chunk costs more than short products
FEW_TOKENS = 4  # up to here the recurrence does less than the set-up of a chunk


def chunk_length(plan: Plan, T: int) -> int:
    """C; the parallel form goes in tiles of the default length."""
    if is_parallel(plan, T):
        return DEFAULT_CHUNK
    return int(plan.chunk_size or preferred_chunk(plan))


def preferred_chunk(plan: Plan) -> int:
    """C where the caller leaves it open: a function of the library alone, so that bits do not depend on the batch."""
    return NUMPY_CHUNK if compat.is_numpy_namespace(plan.xp) else DEFAULT_CHUNK


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


class _Job(NamedTuple):
    """One sequence of one block."""

    sequence: Sequence
    table: list[Chunk]
    block: Block


def _jobs(core: Inputs, plan: Plan) -> list[_Job]:
    """All blocks of the first sequence, of the second, ..."""
    lengths = [chunk_length(plan, s.stop - s.start) for s in plan.sequences]
    return [_Job(s, chunks(s, C), block) for s, C in zip(plan.sequences, lengths, strict=True)
            for block in blocks_of(core, plan, C)]  # fmt: skip


def _states(plan: Plan, jobs: list[_Job], parts: list[Array], whole: list[Array]) -> Array:
    """The public array of the states that the jobs end with; `whole` are the states they began with."""
    found = []
    for sequence, S in zip(plan.sequences, whole, strict=True):
        own = [n for n, job in enumerate(jobs) if job.sequence is sequence]
        found.append(assemble(plan, [jobs[n].block for n in own], [parts[n] for n in own], S.shape))
    return gather_states(plan, found)


def forward(x: Inputs, plan: Plan, state: Array | None, states: str = "loop") -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved).   states: "loop" hands the state on, "scan" composes chunk transfers."""
    xp, G = plan.xp, groups(x)
    core, out = split_all(xp, x, G), None
    if x.q is not None:
        H = max(x.q.shape[-2], x.v.shape[-2])
        out = TokenBuffer(xp, (*x.v.shape[:-2], H, x.v.shape[-1]), x.v.dtype, device(x.v))
    jobs = _jobs(core, plan)
    begins = {s: initial_state(core, plan, state, s.row, G) for s in plan.sequences}
    ends, kept = [None] * len(jobs), [None] * len(jobs)

    def walk(n: int, put: Any) -> None:
        sequence, table, block = jobs[n]
        form, S = _walk(plan, sequence.stop - sequence.start, states), cut(begins[sequence], block)
        ends[n], kept[n] = form.forward(cut_all(core, block), plan, table, S, put)

    run([partial(walk, n, out.part(job.block, G).put if out is not None else None) for n, job in enumerate(jobs)],
        math.prod(x.v.shape))  # fmt: skip
    end = _states(plan, jobs, ends, [begins[s] for s in plan.sequences])
    return None if out is None else out.done(), end, Saved(x, plan, state, (jobs, kept, states))


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input, in the dtype of the computation, and of the initial state."""
    x, plan, _, (jobs, kept, states) = saved
    xp, G = plan.xp, groups(x)
    core = split_all(xp, x, G)
    dcore = None if dout is None else split(xp, dout, G)
    buffers = {
        name: TokenBuffer(xp, tuple(y.shape), plan.dtype, device(x.v))
        for name, y in x._asdict().items()
        if y is not None and name != "u"
    }
    bonus: list[list[Array]] = [[] for _ in jobs]
    ends = {s: initial_state(core, plan, dstate, s.row, G) for s in plan.sequences}
    begins = [None] * len(jobs)

    def walk(n: int, parts: dict[str, TokenBuffer]) -> None:
        sequence, table, block = jobs[n]
        part = cut_all(core, block)

        def put(start: int, grads: dict[str, Array]) -> None:
            for name, d in grads.items():
                if name == "u":
                    bonus[n].append(sum_to(xp, d, part.u.shape))
                else:
                    parts[name].put(start, d)

        form, dS = _walk(plan, sequence.stop - sequence.start, states), cut(ends[sequence], block)
        begins[n] = form.backward(part, plan, table, kept[n], cut(dcore, block), dS, put)

    run([partial(walk, n, {name: buffer.part(job.block, G) for name, buffer in buffers.items()})
         for n, job in enumerate(jobs)], math.prod(x.v.shape))  # fmt: skip
    arrays = {name: buffer.done() for name, buffer in buffers.items()}
    if x.u is not None:
        arrays["u"] = _bonus(plan, core, jobs, bonus, x.u.shape)
    begin = _states(plan, jobs, begins, [ends[s] for s in plan.sequences])
    return Inputs(**{name: arrays.get(name) for name in Inputs._fields}), begin


def _bonus(
    plan: Plan, core: Inputs, jobs: list[_Job], found: list[list[Array]], shape: tuple[int, ...]
) -> Array:
    """du (H, K): sums over chunks and sequences, groups of heads side by side."""
    xp, sums = plan.xp, dict[int, Array]()
    for job, parts in zip(jobs, found, strict=True):
        first = job.block.groups.start or 0
        sums[first] = sum(parts, sums.get(first, 0.0))
    if not any(found):
        return xp.reshape(xp.zeros_like(cast(xp, core.u, plan.dtype)), shape)
    return xp.reshape(xp.concat([sums[first] for first in sorted(sums)], axis=0), shape)
