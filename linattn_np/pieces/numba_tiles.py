"""Products of small matrices, triangular solves and transposes, in register tiles.

A tile is R rows of L vectors of the result that stay in registers while the inner index runs: of every row of A one
number is spread over a vector and multiplied with L vectors of B. Each element of a result is one chain of fused
multiply-adds over the inner index, whatever the tile it falls into: the bits do not depend on how a matrix is cut.
Matrices are addresses with strides, so a transpose is a change of strides and a column block a change of address.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

from .numba_jit import apart, jit, vectors

# (bytes in a vector, rows R and vectors L of a tile): 16 accumulators of 32 registers, or 8 of 16
BYTES, ROWS, LANES = {"avx512": (64, 8, 2), "avx2": (32, 4, 2), "plain": (16, 4, 2)}[vectors()]
PAD = 8  # tokens of a chunk are padded to whole tiles
FULL, LEFT_LOWER, LEFT_UPPER, OUT_LOWER = 0, 1, 2, 3  # which half of a matrix is zero, or not wanted

I64, I32, I1 = ir.IntType(64), ir.IntType(32), ir.IntType(1)


class Mat(NamedTuple):
    """Where a matrix lies: address of element (0, 0), and the numbers of elements to the next row and column."""

    at: int
    row: int
    col: int


class Rows(NamedTuple):
    """A factor for each row: address of the first, and the numbers of elements to the next (0: the same for all)."""

    at: int
    step: int


class Emit:
    """Vector instructions for one element type."""

    def __init__(self, builder: ir.IRBuilder, number: types.Type):
        self.b = builder
        self.bits = number.bitwidth
        self.size = self.bits // 8
        self.F = ir.FloatType() if self.bits == 32 else ir.DoubleType()
        self.W = BYTES // self.size
        self.V = ir.VectorType(self.F, self.W)

    def const(self, i: int) -> ir.Constant:
        return ir.Constant(I64, i)

    def address(self, base: ir.Value, *offsets: ir.Value) -> ir.Value:
        """base + size * (sum of offsets)."""
        total = offsets[0]
        for x in offsets[1:]:
            total = self.b.add(total, x)
        return self.b.add(base, self.b.mul(total, self.const(self.size)))

    def number(self, address: ir.Value) -> ir.Value:
        x = self.b.load(self.b.inttoptr(address, self.F.as_pointer()))
        x.align = self.size
        return x

    def spread(self, x: ir.Value) -> ir.Value:
        none = ir.Constant(self.V, ir.Undefined)
        one = self.b.insert_element(none, x, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, none, ir.Constant(ir.VectorType(I32, self.W), [0] * self.W))

    def zero(self) -> ir.Constant:
        return ir.Constant(self.V, [0.0] * self.W)

    def lanes_below(self, n: ir.Value, first: int) -> ir.Value:
        """Mask of the lanes whose column first + lane is < n."""
        I = ir.VectorType(I64, self.W)
        none = ir.Constant(I, ir.Undefined)
        one = self.b.insert_element(none, n, ir.Constant(I32, 0))
        all_n = self.b.shuffle_vector(one, none, ir.Constant(ir.VectorType(I32, self.W), [0] * self.W))
        return self.b.icmp_signed("<", ir.Constant(I, [first + w for w in range(self.W)]), all_n)

    def load(self, address: ir.Value, mask: ir.Value | None) -> ir.Value:
        p = self.b.inttoptr(address, self.V.as_pointer())
        if mask is None:
            x = self.b.load(p)
            x.align = self.size
            return x
        fn = self.function(f"llvm.masked.load.v{self.W}f{self.bits}.p0", self.V, [p.type, I32, mask.type, self.V])
        return self.b.call(fn, [p, ir.Constant(I32, self.size), mask, self.zero()])

    def store(self, x: ir.Value, address: ir.Value, mask: ir.Value | None) -> None:
        p = self.b.inttoptr(address, self.V.as_pointer())
        if mask is None:
            self.b.store(x, p).align = self.size
            return
        fn = self.function(
            f"llvm.masked.store.v{self.W}f{self.bits}.p0", ir.VoidType(), [self.V, p.type, I32, mask.type]
        )
        self.b.call(fn, [x, p, ir.Constant(I32, self.size), mask])

    def fma(self, a: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """a x + y, rounded once."""
        return self.b.call(self.function(f"llvm.fma.v{self.W}f{self.bits}", self.V, [self.V] * 3), [a, x, y])

    def negative(self, x: ir.Value) -> ir.Value:
        return self.b.fneg(x)

    def function(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
        known = self.b.module.globals.get(name)
        return known or ir.Function(self.b.module, ir.FunctionType(result, arguments), name)


def _inner(e: Emit, A: list, a_col: ir.Value, B: ir.Value, b_row: ir.Value, K: ir.Value, masks: list) -> list:
    """The loop over the inner index: R L sums of A_ik B_k."""
    b, zero, L = e.b, e.zero(), len(masks)
    before = b.block
    loop, done = b.append_basic_block("inner"), b.append_basic_block("inner.done")
    b.cbranch(b.icmp_signed(">", K, e.const(0)), loop, done)
    b.position_at_end(loop)
    k, sums = b.phi(I64), [b.phi(e.V) for _ in range(len(A) * L)]
    k.add_incoming(e.const(0), before)
    row, column = b.mul(k, b_row), b.mul(k, a_col)
    B_k = [e.load(e.address(B, row, e.const(j * e.W)), masks[j]) for j in range(L)]
    new = []
    for i, at in enumerate(A):
        a = e.spread(e.number(e.address(at, column)))
        new += [e.fma(a, B_k[j], sums[i * L + j]) for j in range(L)]
    after = b.add(k, e.const(1))
    k.add_incoming(after, loop)
    for phi, x in zip(sums, new, strict=True):
        phi.add_incoming(zero, before)
        phi.add_incoming(x, loop)
    b.cbranch(b.icmp_signed("<", after, K), loop, done)
    b.position_at_end(done)
    result = []
    for x in new:
        phi = b.phi(e.V)
        phi.add_incoming(zero, before)
        phi.add_incoming(x, loop)
        result.append(phi)
    return result


def _product_tile(R: int, L: int, masked: bool):
    """out_i = rows_i (A B)_i + added_rows_i added_i for R rows and L vectors; added.at = 0 where nothing is added.

    Rows from m on repeat row m - 1: they compute and store the same numbers once more.
    """

    @intrinsic
    def tile(context, one, A, a_row, a_col, B, b_row, rows, rows_step, added, added_row, added_rows, added_step,
             out, out_row, m, n, K):  # fmt: skip
        def emit(context, b, signature, given):
            (_, A, a_row, a_col, B, b_row, rows, rows_step, added, added_row, added_rows, added_step,
             out, out_row, m, n, K) = given  # fmt: skip
            e = Emit(b, signature.args[0])
            last = b.sub(m, e.const(1))
            index = [e.const(0)]
            for i in range(1, R):
                index.append(b.select(b.icmp_signed("<", e.const(i), m), e.const(i), last))
            masks = [e.lanes_below(n, j * e.W) if masked else None for j in range(L)]
            sums = _inner(e, [e.address(A, b.mul(i, a_row)) for i in index], a_col, B, b_row, K, masks)
            for i in range(R):
                factor = e.spread(e.number(e.address(rows, b.mul(index[i], rows_step))))
                for j in range(L):
                    sums[i * L + j] = b.fmul(sums[i * L + j], factor)
            before = b.block
            add, done = b.append_basic_block("add"), b.append_basic_block("store")
            b.cbranch(b.icmp_signed("!=", added, e.const(0)), add, done)
            b.position_at_end(add)
            total = []
            for i in range(R):
                factor = e.spread(e.number(e.address(added_rows, b.mul(index[i], added_step))))
                for j in range(L):
                    x = e.load(e.address(added, b.mul(index[i], added_row), e.const(j * e.W)), masks[j])
                    total.append(e.fma(x, factor, sums[i * L + j]))
            b.branch(done)
            b.position_at_end(done)
            results = []
            for x, y in zip(sums, total, strict=True):
                phi = b.phi(e.V)
                phi.add_incoming(x, before)
                phi.add_incoming(y, add)
                results.append(phi)
            for i in range(R):
                for j in range(L):
                    at = e.address(out, b.mul(index[i], out_row), e.const(j * e.W))
                    e.store(results[i * L + j], at, masks[j])
            return context.get_dummy_value()

        return types.void(one, *[types.int64] * 16), emit

    return tile


def _solve_tile(R: int, L: int, masked: bool):
    """R rows of (1 + N) X = Y in place: X_i -= (N X)_i over the K rows above, then substitution inside the tile."""

    @intrinsic
    def tile(context, one, N, n_row, n_col, top, X, x_row, n, K):
        def emit(context, b, signature, given):
            _, N, n_row, n_col, top, X, x_row, n, K = given
            e = Emit(b, signature.args[0])
            masks = [e.lanes_below(n, j * e.W) if masked else None for j in range(L)]
            rows = [e.address(N, b.mul(e.const(i), n_row)) for i in range(R)]
            sums = _inner(e, rows, n_col, top, x_row, K, masks)
            X_at = [[e.address(X, b.mul(e.const(i), x_row), e.const(j * e.W)) for j in range(L)] for i in range(R)]
            x = [[b.fsub(e.load(X_at[i][j], masks[j]), sums[i * L + j]) for j in range(L)] for i in range(R)]
            for i in range(1, R):
                for s in range(i):
                    coefficient = e.number(e.address(rows[i], b.mul(b.add(K, e.const(s)), n_col)))
                    coefficient = e.spread(e.negative(coefficient))
                    x[i] = [e.fma(coefficient, x[s][j], x[i][j]) for j in range(L)]
            for i in range(R):
                for j in range(L):
                    e.store(x[i][j], X_at[i][j], masks[j])
            return context.get_dummy_value()

        return types.void(one, *[types.int64] * 8), emit

    return tile


@intrinsic
def _transpose_tile(context, one, A, a_row, m, out, out_row):
    """A square of W rows of one vector, row m - 1 again from m on: halves change places at distances W / 2, ..., 1."""

    def emit(context, b, signature, given):
        _, A, a_row, m, out, out_row = given
        e = Emit(b, signature.args[0])
        W, M = e.W, ir.VectorType(I32, e.W)
        last = b.sub(m, e.const(1))
        index = [b.select(b.icmp_signed("<", e.const(i), m), e.const(i), last) for i in range(W)]
        r = [e.load(e.address(A, b.mul(a_row, i)), None) for i in index]
        s = W // 2
        while s:
            low = ir.Constant(M, [w if not w & s else W + w - s for w in range(W)])
            high = ir.Constant(M, [w + s if not w & s else W + w for w in range(W)])
            for i in range(W):
                if not i & s:
                    r[i], r[i | s] = b.shuffle_vector(r[i], r[i | s], low), b.shuffle_vector(r[i], r[i | s], high)
            s //= 2
        for i in range(W):
            e.store(r[i], e.address(out, b.mul(out_row, e.const(i))), None)
        return context.get_dummy_value()

    return types.void(one, *[types.int64] * 5), emit


@intrinsic
def size_of(context, one):
    """Bytes of an element."""

    def emit(context, b, signature, given):
        return ir.Constant(I64, signature.args[0].bitwidth // 8)

    return types.int64(one), emit


_tile_whole, _tile_masked = _product_tile(ROWS, LANES, False), _product_tile(ROWS, LANES, True)
_tile_narrow, _tile_few = _product_tile(ROWS, 1, True), _product_tile(2, 4, True)
_solve_whole, _solve_masked = _solve_tile(ROWS, LANES, False), _solve_tile(ROWS, LANES, True)


@jit
def moved(one, A, i, j):
    """The part of A from row i and column j on."""
    return Mat(A.at + size_of(one) * (i * A.row + j * A.col), A.row, A.col)


@jit
def as_column(factors):
    """Factors as a matrix of one column."""
    return Mat(factors.at, factors.step, 1)


@jit
def turned(A):
    """A^T."""
    return Mat(A.at, A.col, A.row)


@jit
def product(one, half, A, B, m, n, k, rows, added, added_rows, out):
    """out = diag(rows) A B + diag(added_rows) added:  A (m, k), B (k, n), added (m, n); but A with columns of stride 1.

    half  LEFT_LOWER, LEFT_UPPER: only that triangle of A is read; OUT_LOWER: out is computed up to its diagonal's tile.
    """
    apart()
    size = size_of(one)
    width = BYTES // size
    step = width * LANES
    few = half == FULL and m <= 2
    if few:
        step = width * 4
    for j in range(0, n, step):
        first = j // ROWS * ROWS if half == OUT_LOWER else 0
        for i in range(first, m, ROWS):
            begin = i if half == LEFT_UPPER else 0
            end = min(k, i + ROWS) if half == LEFT_LOWER else k
            columns = (min(n, i + ROWS) if half == OUT_LOWER else n) - j
            A_at = A.at + size * (i * A.row + begin * A.col)
            B_at = B.at + size * (begin * B.row + j)
            rows_at = rows.at + size * i * rows.step
            added_at = added.at + size * (i * added.row + j) if added.at != 0 else 0
            added_rows_at = added_rows.at + size * i * added_rows.step
            out_at = out.at + size * (i * out.row + j)
            if few:
                _tile_few(one, A_at, A.row, A.col, B_at, B.row, rows_at, rows.step, added_at, added.row,
                          added_rows_at, added_rows.step, out_at, out.row, m - i, columns, end - begin)  # fmt: skip
            elif columns >= step:
                _tile_whole(one, A_at, A.row, A.col, B_at, B.row, rows_at, rows.step, added_at, added.row,
                            added_rows_at, added_rows.step, out_at, out.row, m - i, columns, end - begin)  # fmt: skip
            elif columns > width:
                _tile_masked(one, A_at, A.row, A.col, B_at, B.row, rows_at, rows.step, added_at, added.row,
                             added_rows_at, added_rows.step, out_at, out.row, m - i, columns, end - begin)  # fmt: skip
            else:
                _tile_narrow(one, A_at, A.row, A.col, B_at, B.row, rows_at, rows.step, added_at, added.row,
                             added_rows_at, added_rows.step, out_at, out.row, m - i, columns, end - begin)  # fmt: skip


@jit
def solve_lower(one, N, X, m, n):
    """X <- (1 + N)^-1 X:  N (m, m) strictly lower, X (m, n) with columns of stride 1, m a multiple of 8."""
    apart()
    size = size_of(one)
    step = BYTES // size * LANES
    for j in range(0, n, step):
        top = X.at + size * j
        for i in range(0, m, ROWS):
            N_at, X_at = N.at + size * i * N.row, top + size * i * X.row
            if n - j >= step:
                _solve_whole(one, N_at, N.row, N.col, top, X_at, X.row, n - j, i)
            else:
                _solve_masked(one, N_at, N.row, N.col, top, X_at, X.row, n - j, i)


@jit
def solve_lower_transposed(one, N, X, m, n):
    """X <- (1 + N)^-T X: read from the last row up, 1 + N^T is lower."""
    end = moved(one, N, m - 1, m - 1)
    solve_lower(one, Mat(end.at, -N.col, -N.row), Mat(moved(one, X, m - 1, 0).at, -X.row, 1), m, n)


@jit
def transpose(one, A, m, n, out):
    """out = A^T:  A (m, n) and out (n, m) with columns of stride 1, and room for whole vectors in rows and in out."""
    apart()
    size = size_of(one)
    width = BYTES // size
    for i in range(0, m, width):
        for j in range(0, n, width):
            _transpose_tile(one, A.at + size * (i * A.row + j), A.row, m - i, out.at + size * (j * out.row + i), out.row)


def _array(context, builder, kind, at, n):
    """n elements from an address on, as an array that owns nothing."""
    made = context.make_array(kind)(context, builder)
    size = ir.Constant(I64, kind.dtype.bitwidth // 8)
    data = builder.inttoptr(at, context.get_data_type(kind.dtype).as_pointer())
    arrayobj.populate_array(made, data, [n], [size], size, meminfo=None)
    return made._getvalue()


@intrinsic
def line(context, one, at, n):
    """n elements of the type of `one` from an address on, as an array."""
    kind = types.Array(types.unliteral(one), 1, "C")

    def emit(context, b, signature, given):
        return _array(context, b, kind, given[1], given[2])

    return kind(one, types.int64, types.int64), emit


@intrinsic
def row(context, one, A, i, n):
    """Row i of A as an array: n columns of stride 1."""
    kind = types.Array(types.unliteral(one), 1, "C")

    def emit(context, b, signature, given):
        at, step = b.extract_value(given[1], 0), b.extract_value(given[1], 1)
        step = b.mul(b.mul(step, given[2]), ir.Constant(I64, kind.dtype.bitwidth // 8))
        return _array(context, b, kind, b.add(at, step), given[3])

    return kind(one, A, types.int64, types.int64), emit
