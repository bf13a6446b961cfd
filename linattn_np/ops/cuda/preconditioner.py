"""Preconditioned keys and their transpose (ops/preconditioner.py) on CuPy arrays, by a kernel each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...runtime.arrays import Array, cast
from ...runtime.cuda.record import empty
from . import sums
from .arguments import PRECONDITIONER, address
from .formulas import takes
from .row_arrays import dense, kind_of, launched
from .stabiliser import LANES, THREADS, offsets_of

SOURCE = "ops/preconditioner.cu"
SEGMENTS = THREADS // LANES  # parts of a sequence
WIDEST = 256  # channels


def supports(x: Any, *more: Array | None) -> bool:
    """Whether the kernels take keys and states or gradients of them."""
    return 0 < x.k.shape[-1] <= WIDEST and x.k.size > 0 and x.b.size > 0 and takes(*x, *more)


def preconditioned(how: Any, x: Any, begin: Any, stored: Any) -> tuple[Array, Array]:
    """As ops/preconditioner.py."""
    call = Call(how, x, begin)
    w, end = empty((*call.tokens, call.K), np.dtype(stored)), empty(call.owners, call.dtype)
    call.run("preconditioned", w=w, end=end)
    return w, end


def preconditioned_vjp(how: Any, x: Any, begin: Any, dw: Any, dend: Any) -> tuple[Any, Array]:
    """As ops/preconditioner.py, but for the sum of dk over heads that share a key."""
    call = Call(how, x, begin)
    A, dk = (empty((*call.tokens, call.K), call.dtype) for _ in range(2))
    da, db = (empty(call.tokens, call.dtype) for _ in range(2))
    dcenter, dbegin = empty((call.sequences * SEGMENTS, call.H), call.dtype), empty(call.owners, call.dtype)
    call.run("preconditioned_vjp", dw=dense(dw), dend=call.sums(dend), A=A, dk=dk, da=da, db=db, dcenter=dcenter,
             dbegin=dbegin)  # fmt: skip
    return type(x)(dk, da, db, sums.over_tokens(dcenter)), dbegin


class Call:
    """The arrays of a call, dense, and its launches."""

    def __init__(self, how: Any, x: Any, begin: Any) -> None:
        (*lead, self.T, self.H), (Hk, self.K) = x.b.shape, x.k.shape[-2:]
        self.how, self.dtype, self.group = how, np.dtype(how.dtype), self.H // Hk
        offsets = offsets_of(how.xp, how.sequences)
        self.sequences = math.prod(lead) if offsets is None else len(how.sequences)
        self.tokens = (*lead, self.T, self.H)
        self.owners = (*(lead if offsets is None else (self.sequences,)), self.H, self.K)
        self.given = {n: dense(y) for n, y in x._asdict().items()} | {"begin": self.sums(begin), "offsets": offsets}

    def sums(self, y: Any) -> Any:
        """Dense sums of squares, or their gradients, in the dtype of the computation."""
        return None if y is None else dense(cast(self.how.xp, y, self.dtype))

    def run(self, entry: str, **arrays: Any) -> None:
        """Launch an entry: a block for each head of a sequence."""
        every = self.given | arrays
        wide = kind_of(every["dk"] if "dk" in every else every["end"])
        kinds = {f"{n}_kind": kind_of(every[n]) for n in ("a", "b", "center")}
        packed = PRECONDITIONER.pack(
            **{n: address(every.get(n)) for n in POINTERS}, **kinds, T=self.T, H=self.H, group=self.group,
            eps=self.how.eps, rate=math.log(self.how.span),
        )  # fmt: skip
        constants = {"LA_K": self.K, "LA_DTYPE": kind_of(every["k"]), "LA_WIDE": wide}
        constants |= {f"LA_{n}": wide if every.get(y) is None else kind_of(every[y]) for n, y in OWN}
        launched(SOURCE, entry, constants, self.sequences * self.H, THREADS, packed, *every.values())


POINTERS = [name for name, kind, *_ in PRECONDITIONER.fields if isinstance(kind, str) and kind.endswith("*")]
OWN = (("OUT", "w"), ("GRAD", "dw"))  # constants of arrays of their own dtype
