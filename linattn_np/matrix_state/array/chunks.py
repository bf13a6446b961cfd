"""The chunk form in array-API calls: NumPy, CuPy, PyTorch, JAX, array-api-strict, dask.

This file splits a call into sequences and blocks and assembles the results; running.py, scan.py and parallel.py are
three ways to propagate the state between chunks, one_chunk.py is the algebra inside a chunk. The form of a sequence
depends on its own length only: the same sequence gives the same bits alone and in a batch.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

from ...runtime.arrays import Array, cast, device, is_numpy, sum_to
from ...runtime.shapes import Sequence, chunks, segments
from .. import definition as recurrence
from .. import policy
from ..blocks import Block, assemble, blocks_of, cut, cut_all, run
from ..heads import TokenBuffer, gather_states, gradient_buffers, groups, initial_state, split, split_all
from ..segments import Segments, SegmentTable, gradients_at, with_positions
from ..types import Inputs, Plan, Saved
from . import parallel, running, scan


def form(x: Inputs, plan: Plan) -> tuple[str, int]:
    """(form, tokens of a chunk)."""
    T = x.v.shape[-3]
    name = "parallel form in tiles" if policy.is_parallel(plan, T) else "chunk form"
    return name, min(policy.array_chunk(plan, T), max(T, 1))


def _form_of(core: Inputs, plan: Plan, T: int, states: str | None) -> Any:
    if policy.is_short(plan, T):
        return recurrence.TOKEN_LOOP
    return (
        parallel
        if policy.is_parallel(plan, T)
        else {"loop": running, "scan": scan}[states or policy.chunk_states(core, plan, T)]
    )


class _Job(NamedTuple):
    """One sequence of one block."""

    sequence: Sequence
    tables: list[SegmentTable]  # of its segments
    block: Block


def _jobs(core: Inputs, plan: Plan) -> list[_Job]:
    """All blocks of the first sequence, of the second, ..."""
    lengths = [policy.array_chunk(plan, s.stop - s.start) for s in plan.sequences]
    return [_Job(s, [SegmentTable(chunks(part, C), at) for part, at in segments(s, plan.states_at or ())], block)
            for s, C in zip(plan.sequences, lengths, strict=True) for block in blocks_of(core, plan, C)]  # fmt: skip


def _states(plan: Plan, jobs: list[_Job], parts: list[Array], like: list[Array]) -> Array:
    """The public array of the states of all jobs, `parts`; `like` are states of whole sequences, for their shapes."""
    each = zip(plan.sequences, like, strict=True)
    return gather_states(plan, [_assembled(plan, jobs, parts, sequence, S) for sequence, S in each])


def _assembled(plan: Plan, jobs: list[_Job], parts: list[Array], sequence: Sequence, like: Array) -> Array:
    """The state of a sequence in core layout, from the states of its jobs."""
    own = [n for n, job in enumerate(jobs) if job.sequence is sequence]
    return assemble(plan, [jobs[n].block for n in own], [parts[n] for n in own], like.shape)


def _with_positions(plan: Plan, jobs: list[_Job], ends: list[list[Array]], like: list[Array]) -> Any:
    """The public final state from those at the ends of the segments of all jobs, and the states at positions."""
    at = []
    for sequence, S in zip(plan.sequences, like, strict=True):
        tables = next(job.tables for job in jobs if job.sequence is sequence)
        at += [_assembled(plan, jobs, [each[min(n, len(each) - 1)] for each in ends], sequence, S)
               for n, table in enumerate(tables) if table.at >= 0]  # fmt: skip
    return with_positions(plan, _states(plan, jobs, [each[-1] for each in ends], like), at)


def forward(x: Inputs, plan: Plan, state: Array | None, states: str | None = None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, residuals).   states: instead of plan.chunk_states."""
    xp, G = plan.xp, groups(x)
    core, out = split_all(xp, x, G), None
    if x.q is not None:
        H = max(x.q.shape[-2], x.v.shape[-2])
        out = TokenBuffer(xp, (*x.v.shape[:-2], H, x.v.shape[-1]), x.v.dtype, device(x.v))
    jobs = _jobs(core, plan)
    begins = {s: initial_state(core, plan, state, s.row, G) for s in plan.sequences}
    ends: list[list[Array]] = [[] for _ in jobs]
    residuals: list[Any] = [None for _ in jobs]

    def run_job(n: int, put: Any) -> None:
        sequence, tables, block = jobs[n]
        form, S = _form_of(core, plan, sequence.stop - sequence.start, states), cut(begins[sequence], block)
        ends[n], residuals[n] = Segments(form, tables).forward(cut_all(core, block), plan, S, put)

    run([partial(run_job, n, out.part(job.block, G).put if out is not None else None) for n, job in enumerate(jobs)],
        math.prod(x.v.shape) if is_numpy(xp) else 0)  # fmt: skip
    end = _with_positions(plan, jobs, ends, [begins[s] for s in plan.sequences])
    return None if out is None else out.done(), end, Saved(x, plan, state, (jobs, residuals, states))


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input, in the dtype of the computation, and of the initial state."""
    x, plan, _, (jobs, residuals, states) = saved
    xp, G = plan.xp, groups(x)
    core = split_all(xp, x, G)
    dcore = None if dout is None else split(xp, dout, G)
    buffers = gradient_buffers(x, plan)
    bonus: list[list[Array]] = [[] for _ in jobs]
    dend, dat = gradients_at(core, plan, dstate, G)
    ends = {s: initial_state(core, plan, dend, s.row, G) for s in plan.sequences}
    begins = [None] * len(jobs)

    def run_job(n: int, parts: dict[str, TokenBuffer]) -> None:
        sequence, tables, block = jobs[n]
        part, own = cut_all(core, block), [cut(d, block) for d in dat]

        def put(start: int, grads: dict[str, Array]) -> None:
            for name, d in grads.items():
                if name == "u":
                    bonus[n].append(sum_to(xp, d, part.u.shape))
                else:
                    parts[name].put(start, d)

        form, dS = _form_of(core, plan, sequence.stop - sequence.start, states), cut(ends[sequence], block)
        begins[n] = Segments(form, tables).backward(part, plan, residuals[n], cut(dcore, block), dS, own, put)

    run([partial(run_job, n, {name: buffer.part(job.block, G) for name, buffer in buffers.items()})
         for n, job in enumerate(jobs)], math.prod(x.v.shape) if is_numpy(xp) else 0)  # fmt: skip
    arrays = {name: buffer.done() for name, buffer in buffers.items()}
    if x.u is not None:
        arrays["u"] = _bonus(plan, core, jobs, bonus, x.u.shape)
    begin = _states(plan, jobs, begins, [ends[s] for s in plan.sequences])
    return Inputs(**{name: arrays.get(name) for name in Inputs._fields}), begin


def _bonus(plan: Plan, core: Inputs, jobs: list[_Job], bonus: list[list[Array]], shape: tuple[int, ...]) -> Array:
    """du (H, K): sums over chunks and sequences, groups of heads side by side."""
    xp, sums = plan.xp, dict[int, Array]()
    for job, parts in zip(jobs, bonus, strict=True):
        first = job.block.groups.start or 0
        sums[first] = sum(parts, sums.get(first, 0.0))
    if not any(bonus):
        return xp.reshape(xp.zeros_like(cast(xp, core.u, plan.dtype)), shape)
    return xp.reshape(xp.concat([sums[first] for first in sorted(sums)], axis=0), shape)
