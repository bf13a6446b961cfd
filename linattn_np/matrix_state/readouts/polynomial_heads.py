"""Similarities that are polynomials of q . k: the heads of one block, chunk by chunk (polynomial.py has the equations).

The adjoint stores two numbers a token. It goes forward in time with S, for dq and for pairs of tokens that see each
other, and backward with dS, for dk and dv: there is no decay, so S and dS never meet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...ops import polynomial_maps
from ...ops.averages import divide, divide_vjp, with_ones
from ...ops.feature_maps import FeatureMap, powers
from ...runtime.arrays import Array, cast, device, sum_dtype, sum_to
from ...runtime.shapes import Chunk, Sequence, chunks
from .. import policy
from ..types import Plan


class Polynomial(NamedTuple):
    """Rows and a polynomial of q . k / sqrt(K), or gradients of the rows."""

    q: Array  # (..., Tq, Hq, K)  None: write without reading
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    coefficients: tuple[float, ...] = ()
    eps: float | None = None  # added to the sum of weights that outputs are divided by; None: no division
    exact: bool = False  # rows are float32: features and states are float64

    @property
    def features(self) -> int:
        """M."""
        return polynomial_maps.powers_width(self.k.shape[-1], self.coefficients)

    def wide(self, plan: Plan) -> Any:
        """The dtype of features and states."""
        return sum_dtype(plan.xp, self.v) if self.exact else plan.dtype


class HeadStep(NamedTuple):
    """Queries see the keys of `sees` one by one and, through S, all that was written before; then keys are written."""

    queries: Any = None  # Chunk
    sees: tuple[Chunk, ...] = ()
    writes: Any = None  # Chunk


def chunk_of(x: Polynomial, plan: Plan, s: Sequence) -> tuple[int, bool]:
    """(tokens of a tile, whether tokens see each other without features) of a sequence."""
    queries = None if x.q is None or s.row is not None else x.q.shape[-3]
    return policy.polynomial_chunk(plan, s.stop - s.start, x.features, x.k.shape[-1], x.v.shape[-1], queries)


def steps_of(x: Polynomial, plan: Plan, s: Sequence) -> list[HeadStep]:
    """The steps of a sequence. Where every query sees every key, all is written before it is read, or nothing."""
    C, is_direct = chunk_of(x, plan, s)
    keys = chunks(s, C)
    if plan.causal and not is_direct:
        return [HeadStep(c if x.q is not None else None, (c,), c) for c in keys]
    late = s if plan.causal or x.q is None or s.row is not None else Sequence(None, 0, x.q.shape[-3])
    reads = [] if x.q is None else chunks(late, C)
    seen = [(tuple(keys[: n + 1]) if plan.causal else tuple(keys)) if is_direct else () for n in range(len(reads))]
    read = [HeadStep(c, sees) for c, sees in zip(reads, seen, strict=True)]
    write = [HeadStep(writes=c) for c in keys]
    return read + write if is_direct else write + read


# the heads of one block


class Heads(NamedTuple):
    """Rows of some heads of one sequence in core layout (..., G, R, T, D), and the operations of the steps."""

    x: Polynomial
    plan: Plan
    steps: list[HeadStep]
    has_state: bool

    def rows(self, name: str, tokens: Chunk) -> Array:
        """q, k, or the values with a column of ones where outputs are averages, in the compute dtype."""
        y = cast(self.plan.xp, getattr(self.x, name)[..., tokens.start : tokens.stop, :], self.plan.dtype)
        return y if name != "v" or self.x.eps is None else with_ones(self.plan.xp, y)

    def phi(self, name: str, tokens: Chunk) -> Array:
        return self.map[0](cast(self.plan.xp, self.rows(name, tokens), self.x.wide(self.plan)))

    def phi_vjp(self, name: str, tokens: Chunk, dphi: Array) -> Array:
        """The transpose; gradients of features are summed over the heads that share them."""
        x = cast(self.plan.xp, self.rows(name, tokens), self.x.wide(self.plan))
        return self.map[1](x, sum_to(self.plan.xp, dphi, (*x.shape[:-1], dphi.shape[-1])))

    @property
    def map(self) -> FeatureMap:
        return powers(self.x.coefficients)

    def reads_state(self, n: int) -> bool:
        """Whether there is a state before step n."""
        return self.has_state or any(step.writes for step in self.steps[:n])

    def is_read(self, n: int) -> bool:
        """Whether a later step reads the state after step n."""
        return any(step.queries for step in self.steps[n + 1 :])

    def pairs(self, queries: Chunk, keys: Chunk) -> tuple[Array, Array]:
        """(q . k / sqrt(K), the pairs that see each other)."""
        xp, q, k = self.plan.xp, self.rows("q", queries), self.rows("k", keys)
        z = (q @ xp.matrix_transpose(k)) * max(q.shape[-1], 1) ** -0.5
        if not self.plan.causal or queries != keys:
            return z, xp.asarray(True, device=device(z))
        return z, xp.tril(xp.ones(z.shape[-2:], dtype=xp.bool, device=device(z)))

    def weights(self, queries: Chunk, keys: Chunk) -> Array:
        """p(q . k / sqrt(K)), 0 for a key after its query."""
        xp, (z, mask) = self.plan.xp, self.pairs(queries, keys)
        return xp.where(mask, polynomial_maps.polynomial(z, self.x.coefficients), xp.zeros_like(z))

    def slopes(self, queries: Chunk, keys: Chunk) -> Array:
        """The derivative of the weights by q . k."""
        xp, (z, mask) = self.plan.xp, self.pairs(queries, keys)
        slope = polynomial_maps.polynomial(z, polynomial_maps.slope(self.x.coefficients))
        return xp.where(mask, slope * max(self.x.k.shape[-1], 1) ** -0.5, xp.zeros_like(z))

    def numerators(self, step: HeadStep, S: Array | None) -> Array:
        """scale (sum_j w_ij v_j + phi(q_i) S)."""
        num: Any = None
        for keys in step.sees:
            one = self.weights(step.queries, keys) @ self.rows("v", keys)
            num = one if num is None else num + one
        if S is not None:
            wide = self.x.wide(self.plan)
            read = self.phi("q", step.queries) @ S
            num = read if num is None else cast(self.plan.xp, num, wide) + read
        return self.plan.scale * (self.zeros(step.queries) if num is None else num)

    def zeros(self, tokens: Chunk) -> Array:
        """Numerators of queries that see nothing."""
        V = self.x.v.shape[-1] + (self.x.eps is not None)
        R = max(self.x.q.shape[-3], self.x.v.shape[-3])
        shape = (*self.x.v.shape[:-3], R, tokens.stop - tokens.start, V)
        return self.plan.xp.zeros(shape, dtype=self.plan.dtype, device=device(self.x.v))

    def written(self, tokens: Chunk, S: Array | None) -> Array:
        """S + phi(k)^T v."""
        xp, wide = self.plan.xp, self.x.wide(self.plan)
        phi, w = self.phi("k", tokens), cast(xp, self.rows("v", tokens), wide)
        shape = (*self.x.v.shape[:-2], phi.shape[-1], w.shape[-1])
        more = sum_to(xp, xp.matrix_transpose(phi) @ w, shape)
        return more if S is None else S + more

    def forward(self, S: Array | None, put: Any) -> Array | None:
        """The final state, None if it is not computed; outputs go to put(t, out)."""
        for n, step in enumerate(self.steps):
            if step.queries is not None:
                out = self.numerators(step, S)
                put(step.queries.start, out if self.x.eps is None else divide(self.plan.xp, out, self.x.eps)[0])
            if step.writes is not None and (self.plan.returns_state or self.is_read(n)):
                S = self.written(step.writes, S)
        return S


class HeadsPullback:
    """The adjoint of the heads of one block."""

    def __init__(self, heads: Heads, dout: Any, put: dict[str, Any]):
        self.heads, self.dout, self.put = heads, dout, put
        self.xp = heads.plan.xp
        self.later: dict[str, dict[Chunk, Array]] = {"k": {}, "v": {}}  # gradients of keys and values so far
        self.weighing: dict[int, tuple[Array, Array]] = {}  # of each step the sums of weights and their gradients

    def add(self, name: str, tokens: Chunk, d: Array) -> None:
        """Add to the gradient of keys or values with a column of ones, which may be shared by heads."""
        x = getattr(self.heads.x, name)
        d = sum_to(self.xp, d, (*x.shape[:-2], *d.shape[-2:]))
        known = self.later[name]
        known[tokens] = known[tokens] + d if tokens in known else d

    def cotangents(self, n: int) -> Array:
        """The gradient of the sums over keys of step n, values and weights."""
        queries, plan = self.heads.steps[n].queries, self.heads.plan
        d = cast(self.xp, self.dout[..., queries.start : queries.stop, :], plan.dtype)
        if self.heads.x.eps is None:
            return plan.scale * d
        sums, dsums = self.weighing[n]
        return plan.scale * self.xp.concat([cast(self.xp, d / sums, sums.dtype), dsums], axis=-1)

    def forward_in_time(self, S: Array | None) -> None:
        """dq, and the terms of dk and dv from queries that see keys one by one."""
        heads, xp, T = self.heads, self.xp, self.xp.matrix_transpose
        for n, step in enumerate(heads.steps):
            if step.queries is not None:
                if heads.x.eps is not None:
                    self.weigh(n, S)
                d = self.cotangents(n)
                dq = None if S is None else heads.phi_vjp("q", step.queries, d @ T(S))
                for keys in step.sees:
                    one = self.direct(step.queries, keys, cast(xp, d, heads.plan.dtype))
                    dq = one if dq is None else dq + one
                if dq is not None:
                    self.put["q"](step.queries.start, dq)
            if step.writes is not None and heads.is_read(n):
                S = heads.written(step.writes, S)

    def weigh(self, n: int, S: Array | None) -> None:
        """Store the sums of weights of step n, with 0 as inf, and their gradients."""
        step = self.heads.steps[n]
        average, sums = divide(self.xp, self.heads.numerators(step, S), self.heads.x.eps or 0.0)
        d = cast(self.xp, self.dout[..., step.queries.start : step.queries.stop, :], average.dtype)
        dsums = divide_vjp(self.xp, average, sums, d)[..., -1:]
        self.weighing[n] = self.xp.where(sums == 0, self.xp.full_like(sums, float("inf")), sums), dsums

    def direct(self, queries: Chunk, keys: Chunk, d: Array) -> Array:
        """dq of pairs; their dk and dv are added."""
        heads, T = self.heads, self.xp.matrix_transpose
        self.add("v", keys, T(heads.weights(queries, keys)) @ d)
        dz = (d @ T(heads.rows("v", keys))) * heads.slopes(queries, keys)
        q = heads.rows("q", queries)
        self.add("k", keys, T(dz) @ q)
        return sum_to(self.xp, dz @ heads.rows("k", keys), q.shape)

    def backward_in_time(self, dS: Array | None) -> Array | None:
        """The gradient of the initial state; adds the terms of dk and dv that pass through states."""
        heads, xp, T, wide = self.heads, self.xp, self.xp.matrix_transpose, self.heads.x.wide(self.heads.plan)
        for n in reversed(range(len(heads.steps))):
            step = heads.steps[n]
            if step.writes is not None and dS is not None:
                w = cast(xp, heads.rows("v", step.writes), wide)
                self.add("k", step.writes, heads.phi_vjp("k", step.writes, w @ T(dS)))
                self.add("v", step.writes, heads.phi("k", step.writes) @ dS)
            if step.queries is not None and self.dout is not None and heads.reads_state(n):
                d = cast(xp, self.cotangents(n), wide)
                more = T(heads.phi("q", step.queries)) @ d
                more = sum_to(xp, more, (*heads.x.v.shape[:-2], *more.shape[-2:]))
                dS = more if dS is None else dS + more
        return dS

    def run(self, S: Array | None, dS: Array | None) -> Array | None:
        """dS_0; gradients go to put[name](t, d)."""
        if self.dout is not None:
            self.forward_in_time(S)
        dS = self.backward_in_time(dS)
        for name, parts in self.later.items():
            for tokens, d in parts.items():
                self.put[name](tokens.start, d if name == "k" else d[..., : self.heads.x.v.shape[-1]])
        return dS
