"""A rank that is a process: `python -m tests.distributed.worker mpi FOLDER TASK`, or `torch RANK SIZE FOLDER TASK`.

compute   write this rank's outputs, final states and gradients of a variant of each kind to FOLDER/RANK.npz
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
from linattn_np.testing import sample

T, SEGMENT = 24, 2
FUNCTIONS = (la.linear_attention, la.simple_gla, la.gla, la.gated_delta_rule, la.kda, la.rwkv7, la.mlstm)
OFFSETS = [0, 5, 5, 19, 24]


def arrays_of(fn, batch):
    """(arrays of all tokens, gradient of the outputs)."""
    rng = np.random.default_rng(3)
    arrays = {n: x.astype(np.float32) for n, x in sample(fn, rng, T=T, B=batch, optional=False).items()}
    return arrays, rng.standard_normal(arrays["v"].shape).astype(np.float32)


def computed(comm):
    """Results by name: every variant, dense and ragged; cut along the axis of tokens, -3 from the end of v's."""
    found, n = {}, T // comm.size
    own = slice(comm.rank * n, (comm.rank + 1) * n)
    for fn in FUNCTIONS:
        for batch, options in (((2,), {}), ((1,), {"cu_seqlens": OFFSETS})):
            arrays, dout = arrays_of(fn, batch)
            mine = {name: x[:, own] for name, x in arrays.items()}
            (out, end), pullback = la.vjp(run, fn, **mine, **options, comm=comm, segment=SEGMENT, return_state=True)
            grads = pullback(dout[:, own])._asdict()
            head = f"{fn.__name__} {len(batch)} {bool(options)}"
            found |= {f"{head} {name}": d for name, d in (grads | {"out": out}).items() if d is not None}
            found |= {f"{head} end {k}": S for k, S in enumerate(end if isinstance(end, tuple) else (end,))}
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
