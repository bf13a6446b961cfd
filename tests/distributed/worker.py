"""A rank that is a process: `python -m tests.distributed.worker mpi FOLDER TASK`, or `torch RANK SIZE FOLDER TASK`.

compute   write this rank's outputs, final states and gradients of every variant that composes to FOLDER/RANK.npz
silent    rank 1 does not answer; the others print their RankError
gone      rank 1 ends; the others print their RankError
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import linattn_np as la
from linattn_np.distributed import MPI, RankError, TorchDistributed, run
from tests.cases import COMPOSING, draw, parts, plain_case

T, SEGMENT = 24, 2
OFFSETS = [0, 5, 5, 19, 24]


def arrays_of(case, batch, options):
    """(arrays of all tokens, gradient of the outputs, float32)."""
    arrays, _ = draw(case, T=T, B=batch, K=4, dtype=np.float32, seed=3)
    out = case.fn(**arrays, **case.options, **options)
    return arrays, np.random.default_rng(3).standard_normal(out.shape).astype(out.dtype)


def computed(comm):
    """Results by name: every variant, dense and ragged; cut along the axis of tokens, the second."""
    found, n = {}, T // comm.size
    own = slice(comm.rank * n, (comm.rank + 1) * n)
    for case in map(plain_case, COMPOSING):
        for batch, options in (((2,), {}), ((1,), {"cu_seqlens": OFFSETS})):
            arrays, dout = arrays_of(case, batch, options)
            mine = {name: x[:, own] if name in case.given and case.on_tokens(name) else x for name, x in arrays.items()}
            (out, end), pullback = la.vjp(run, case.fn, **mine, **case.options, **options, comm=comm, segment=SEGMENT,
                                          return_state=True)  # fmt: skip
            grads = {name: d for name, d in pullback(dout[:, own])._asdict().items() if name in case.given}
            head = f"{case.fn.__name__} {'ragged' if options else 'dense'}"
            found |= {f"{head} {name}": d for name, d in grads.items() if case.on_tokens(name)} | {f"{head} out": out}
            found |= {f"{head} end {k}": S for k, S in enumerate(parts(end))}
    return found


def main(argv):
    kind, *rest = argv
    if kind == "mpi":
        from mpi4py import MPI as mpi

        folder, task = rest
        comm = MPI(mpi.COMM_WORLD, timeout=0.5 if task == "silent" else 60.0)
        leave = lambda: mpi.COMM_WORLD.Abort(3)  # noqa: E731
    else:
        import torch.distributed as dist

        rank, size, folder, task = rest
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(size))
        comm = TorchDistributed(timeout=0.5 if task == "silent" else 60.0)
        leave = lambda: os._exit(3)  # noqa: E731
    if task == "compute":
        np.savez(Path(folder) / f"{comm.rank}.npz", **computed(comm))
        return
    comm.all_gather(np.ones(1))
    if comm.rank == 1:
        if task == "gone":
            os._exit(3)
        time.sleep(60)
    try:
        comm.all_gather(np.ones(1))
    except RankError as error:
        sys.stdout.write(f"RankError {error}\n")
        sys.stdout.flush()
        leave()


if __name__ == "__main__":
    main(sys.argv[1:])
