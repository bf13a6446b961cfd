"""One step of conjugate gradients in every row of a block, in one pass over each row."""

from __future__ import annotations

from .emit import Emit, Mat, Rows, Value, routine
from .rows import dot


@routine
def descend(e: Emit, X: Mat, R: Mat, P: Mat, PA: Mat, rr: Rows, enough: Rows, m: Value, n: Value,
            going: Value) -> None:  # fmt: skip
    """For rows with |r|^2 > enough, PA being p A:  a = |r|^2 / <p, p A>, x += a p, r' = r - a p A, p' = r' + b p.

    b = |r'|^2 / |r|^2.   rr: |r|^2, which it renews. going: address of a whole number, how many rows are not done.
    """
    one, left = e.number(1), e.variable(e.whole(0))
    with e.each(m) as i:
        at, limit = rr.at + i * e.size, e.get(enough.at + i * e.size)
        before = e.get(at)
        with e.when(~(before <= limit)):  # a row that is not a number goes on
            curve = dot(e, e.address(P, i), e.address(PA, i), n)
            step = before // e.select(curve.equals(0.0), one, curve)
            forward, back, square = e.spread(step), e.spread(-step), e.variable(e.zero())

            def move(j: Value, mask: Value | None) -> None:
                p, x, r = (e.load(e.address(Y, i, j), mask) for Y in (P, X, R))
                e.store(e.fma(forward, p, x), e.address(X, i, j), mask)
                r = e.fma(back, e.load(e.address(PA, i, j), mask), r)
                e.store(r, e.address(R, i, j), mask)
                square.set(e.fma(r, r, square.get()))

            e.across(n, move)
            after = e.sum(square.get())
            ratio = e.spread(after // before)

            def turn(j: Value, mask: Value | None) -> None:
                p = e.fma(ratio, e.load(e.address(P, i, j), mask), e.load(e.address(R, i, j), mask))
                e.store(p, e.address(P, i, j), mask)

            e.across(n, turn)
            e.put(after, at)
            with e.when(~(after <= limit)):
                left.set(left.get() + 1)
    e.put(left.get(), going)
