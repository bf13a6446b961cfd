"""Feature maps of rows in compiled loops, each with its transpose; and the division by the sum of similarities.

map_steps.py says what the tables are. Between the last feature of a row and the end of its last vector may be anything.
"""

from __future__ import annotations

from .emit import I64, Emit, Mat, Rows, Value, routine
from .lanes import exp, sine_cosine
from .lengths import length_of
from .rows import dot


@routine
def monomials(e: Emit, X: Mat, segments: Value, count: Value, weights: Rows, m: Value, n: Value, F: Mat) -> None:
    """F_j = weights_j F_s x_l for the features j = t, t + 1, ... and channels l, l + 1, ... of segments (s, l, t)."""
    with e.each(m) as i:
        e.put(e.get(weights.at), e.address(F, i))
    with e.each(count) as s:
        parent, channel, to = _segment(e, segments, s)
        with e.lanes(n - channel) as j:
            w = e.load(weights.at + (to + j) * e.size)
            with e.each(m) as i:
                x = e.load(e.address(X, i, channel + j))
                e.store(e.spread(e.get(e.address(F, i, parent))) * (w * x), e.address(F, i, to + j))


def _segment(e: Emit, segments: Value, s: Value) -> list[Value]:
    return [e.get(segments + (s * 3 + n) * 8, I64) for n in range(3)]


@routine
def monomials_pull(e: Emit, X: Mat, segments: Value, count: Value, weights: Rows, m: Value, n: Value, F: Mat, dF: Mat,
                   dX: Mat) -> None:  # fmt: skip
    """dX += the transpose, segments from the last to the first; dF gains what its children hand down."""
    with e.each(count, down=True) as s:
        parent, channel, to = _segment(e, segments, s)
        with e.each(m) as i:
            f, total = e.spread(e.get(e.address(F, i, parent))), e.variable(e.zero())
            with e.lanes(n - channel) as j:
                mask = e.below(n - channel - j)
                d = e.load(e.address(dF, i, to + j), mask) * e.load(weights.at + (to + j) * e.size, mask)
                total.set(e.fma(d, e.load(e.address(X, i, channel + j), mask), total.get()))
                at = e.address(dX, i, channel + j)
                e.store(e.fma(f, d, e.load(at, mask)), at, mask)
            at = e.address(dF, i, parent)
            e.put(e.get(at) + e.sum(total.get()), at)


@routine
def exponentials(e: Emit, P: Mat, X: Mat, m: Value, n: Value, k: Value, numbers: Rows) -> None:
    """P_ij <- e^{P_ij - square |x_i|^2 - less}, P (m, n), X (m, k)."""
    square, less = e.get(numbers.at), e.get(numbers.at + e.size)
    with e.each(m) as i:
        x = e.address(X, i)
        h = e.spread(square * dot(e, x, x, k) + less)
        with e.lanes(n) as j:
            at = e.address(P, i, j)
            e.store(exp(e, e.load(at) - h), at)


@routine
def exponentials_pull(e: Emit, D: Mat, F: Mat, m: Value, n: Value, numbers: Rows, total: Rows) -> None:
    """D <- F (.) D, total_i = -2 square sum_j D_ij"""
    factor = e.get(numbers.at) * -2.0
    with e.each(m) as i:
        s = e.variable(e.zero())

        def times(j: Value, mask: Value | None) -> None:
            at = e.address(D, i, j)
            d = e.load(at, mask) * e.load(e.address(F, i, j), mask)
            e.store(d, at, mask)
            s.set(s.get() + d)

        e.across(n, times)
        e.put(factor * e.sum(s.get()), total.at + i * e.size)


@routine
def waves(e: Emit, A: Mat, m: Value, half: Value, numbers: Rows, F: Mat) -> None:
    """F = size [sin A, cos A], A (m, half)."""
    size = e.spread(e.get(numbers.at))
    with e.each(m) as i, e.lanes(half) as j:
        mask = e.below(half - j)
        sine, cosine = sine_cosine(e, e.load(e.address(A, i, j), mask))
        e.store(size * sine, e.address(F, i, j), mask)
        e.store(size * cosine, e.address(F, i, half + j), mask)


@routine
def waves_pull(e: Emit, D: Mat, F: Mat, m: Value, half: Value, dA: Mat) -> None:
    """dA = D_sin (.) F_cos - D_cos (.) F_sin"""
    with e.each(m) as i, e.lanes(half) as j:
        mask = e.below(half - j)
        ds, dc, s, c = (e.load(e.address(Y, i, n), mask) for Y in (D, F) for n in (j, half + j))
        e.store(e.fma(ds, c, -(dc * s)), e.address(dA, i, j))


@routine
def inverse_lengths(e: Emit, X: Mat, m: Value, n: Value, out: Rows) -> None:
    """out_i = 1 / |x_i|, and 1 for 0."""
    with e.each(m) as i:
        length, factor = length_of(e, e.address(X, i), n)
        e.put(factor // length, out.at + i * e.size)


@routine
def unit_pull(e: Emit, X: Mat, m: Value, n: Value, over: Rows, dX: Mat) -> None:
    """dX_i <- over_i (dX_i - y_i <y_i, dX_i>), y_i = over_i x_i."""
    with e.each(m) as i:
        x, to, factor = e.address(X, i), e.address(dX, i), e.get(over.at + i * e.size)
        along = e.spread(-(factor * (factor * dot(e, x, to, n))))

        def turn(j: Value, mask: Value | None) -> None:
            d = e.fma(along, e.load(x + j * e.size, mask), e.load(to + j * e.size, mask))
            e.store(e.spread(factor) * d, to + j * e.size, mask)

        e.across(n, turn)


@routine
def averages(e: Emit, P: Mat, Q: Mat, z: Rows, m: Value, k: Value, scale: Rows, eps: Rows, sums: Rows, over: Rows,
             over_scaled: Rows) -> None:  # fmt: skip
    """sums_i = scale q_i . z + sum_{j<=i} P_ij + eps, over_i = 1 / sums_i, over_scaled_i = scale / sums_i; 0 of 0."""
    with e.each(m) as i:
        inside = e.variable(e.zero())
        e.across(i + 1, lambda j, mask: inside.set(inside.get() + e.load(e.address(P, i, j), mask)))
        s = e.get(scale.at)
        total = s * dot(e, e.address(Q, i), z.at, k) + e.sum(inside.get()) + e.get(eps.at)
        none = total.equals(0.0)
        one = e.select(none, e.number(0), e.number(1) // e.select(none, e.number(1), total))
        for y, to in ((total, sums), (one, over), (one * s, over_scaled)):
            e.put(y, to.at + i * e.size)


@routine
def averages_pull(e: Emit, D: Mat, O: Mat, sums: Rows, m: Value, n: Value, C: Mat, w: Rows) -> None:
    """C_i = D_i / sums_i, w_i = -C_i . O_i from the gradients D of the averages O, (m, n); 0 where the sum is 0."""
    with e.each(m) as i:
        total = e.get(sums.at + i * e.size)
        none = total.equals(0.0)
        over = e.spread(e.select(none, e.number(0), e.number(1) // e.select(none, e.number(1), total)))
        s = e.variable(e.zero())

        def divide(j: Value, mask: Value | None) -> None:
            c = over * e.load(e.address(D, i, j), mask)
            e.store(c, e.address(C, i, j), mask)
            s.set(e.fma(c, e.load(e.address(O, i, j), mask), s.get()))

        e.across(n, divide)
        e.put(-e.sum(s.get()), w.at + i * e.size)
