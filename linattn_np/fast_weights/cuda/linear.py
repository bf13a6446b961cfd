"""A linear model with a layer norm, on CuPy arrays, by the kernels of cuda_src/fast_weights: a head a block.

The kernels begin where a mini-batch does. The rest of one that a given state is in goes by array calls, and so does the
first one of such a state, whose weights and anchor may be two.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ...ops.cuda.arguments import address
from ...ops.cuda.row_arrays import dense
from ...ops.sums import sum_to
from ...runtime.arrays import Array, Namespace, cast, dtype_name
from ...runtime.cuda import launch, record
from ...runtime.cuda.elements import ELEMENTS
from ..array import chunks
from ..recorded import zeros_like
from ..types import FastPlan, Inputs, Learner, Rates, State, Tokens, Tree, added, joined
from .arguments import LINEAR, NO_TOKENS
from .plan import EACH, MOST, WIDTHS, before, kernel, mark


def unsupported_reason(x: Inputs, plan: FastPlan) -> str | None:
    """Why the kernels do not compute a call; None if they do."""
    K, V, f = x.k.shape[-1], x.v.shape[-1], plan.learner
    if not (f.model == "linear" and f.loss == "l2" and f.every == "token") or f.renormed:
        return "its kernels of a layer norm are those of a linear model"
    if K != V or V not in WIDTHS or len(x.weights) != 2:
        return f"its kernels have keys and values of {' or '.join(map(str, WIDTHS))} channels, and a bias"
    if f.mini_batch > MOST or plan.chunk_size == 1:
        return f"its kernels take mini-batches of up to {MOST} tokens at once"
    if any(y is not None for y in (x.rates.alpha, x.rates.mu, x.rates.beta)) or len(x.rates.eta) > 1:
        return "its kernels have step sizes and gains, no other rates"
    if x.q is None or len({y.shape[-2] for y in (x.q, x.k, x.v)}) > 1:
        return "its kernels take as many heads of queries and keys as of values"
    if (
        len({dtype_name(y) for y in (x.q, x.k, x.v)}) > 1
        or dtype_name(x.v) not in ELEMENTS
        or plan.dtype != plan.xp.float32
    ):
        return "its kernels read one dtype of 16 or 32 bits"
    if not prod(x.v.shape):
        return "there is nothing to compute"
    return launch.unusable()


def forward(
    f: Learner, xp: Namespace, x: Tokens, begin: State, initial: Tree, slow: Tree, keep: bool, has_end: bool = True
) -> tuple[Any, list[Any]]:
    """(out, [(tokens before the kernel's, their states, stored states), the final state])."""
    T, own, marks, found = x.k.shape[-2], None, None, list[Array]()
    if first := before(f, begin, T):
        y, own = chunks.forward(f, xp, _wide(xp, x.cut(0, first)), begin, initial, slow, keep)
        begin = own[-1]
        found.append(cast(xp, y, x.v.dtype))
    if first < T:
        call = Call(f, xp, x.cut(first, T), slow)
        y, marks, begin = call.forward(begin, keep)
        found.append(y)
    out = xp.concat(found, axis=-2) if len(found) > 1 else found[0] if found else None
    return out, [(first, own, marks), begin]


def backward(
    f: Learner, xp: Namespace, x: Tokens, states: list[Any], initial: Tree, slow: Tree, dout: Any, d: State,
    has_end: bool = True,
) -> tuple[Tokens, State, Tree, Tree]:  # fmt: skip
    """(dx, dstate, dinitial, dslow) from the gradients of out and of the final state."""
    (first, own, marks), _ = states
    T, each, dslow = x.k.shape[-2], list[Tokens](), Tree()
    if first < T:
        call, back = Call(f, xp, x.cut(first, T), slow), None if dout is None else dout[..., first:, :]
        dx, d, more = call.backward(marks, back, d)
        each, dslow = [dx], tuple(sum_to(xp, y, y.shape[1:]) for y in more)
    if first:
        back = None if dout is None else cast(xp, dout[..., :first, :], d.anchor[0].dtype)
        dx, d, _, more = chunks.backward(f, xp, _wide(xp, x.cut(0, first)), own, initial, slow, back, d)
        each.insert(0, _narrow(xp, dx, x))
        dslow = added(tuple(xp.sum(y, axis=0) if y.ndim == 4 else y for y in more), dslow)
    dx = each[0] if len(each) == 1 else joined(xp, each, x)
    return dx, d, (), dslow


def _wide(xp: Namespace, x: Tokens) -> Tokens:
    """Tokens in float32."""
    return x.each(lambda y: cast(xp, y, x.rates.eta[0].dtype))


def _narrow(xp: Namespace, d: Tokens, x: Tokens) -> Tokens:
    """Gradients in the dtypes of the kernels."""
    return d._replace(q=cast(xp, d.q, x.q.dtype), k=cast(xp, d.k, x.k.dtype), v=cast(xp, d.v, x.v.dtype))


class Call:
    """Tokens that begin with a mini-batch."""

    def __init__(self, f: Learner, xp: Namespace, x: Tokens, slow: Tree) -> None:
        (self.N, self.H, self.T, self.D), self.f, self.xp, self.x = x.k.shape, f, xp, x
        self.dtype, self.float = dtype_name(x.v), x.rates.eta[0].dtype
        self.weight, self.shift = (dense(y) for y in slow)
        self.groups = -(-self.T // (f.mini_batch * EACH))

    def forward(self, begin: State, keep: bool) -> tuple[Array, Array | None, State]:
        """(out, states before groups of mini-batches, the final state)."""
        out, (W, b, A, bA) = self._tokens(self.x.v), self._states(2)
        marks = record.empty((self.N * self.H, self.groups, mark(self.D)), self.float) if keep else None
        self._run(
            False, begin.weights, {"out": out}, {"end_W": W, "end_b": b, "end_A": A, "end_bA": bA, "marks": marks}
        )
        ends = (W, b) if self.T % self.f.mini_batch == 0 else (A, bA)
        return out, marks, State(begin.n + self.T, ends, (W, b))

    def backward(self, marks: Array, dout: Any, d: State) -> tuple[Tokens, State, Tree]:
        """(dx, the gradient of the state before, of the norm (N, H, 1, D))."""
        x, (W, b) = self.x, self._states(1)
        grads = {"dq": self._tokens(x.q), "dk": self._tokens(x.k), "dv": self._tokens(x.v)}
        grads |= {"deta": self._tokens(x.rates.eta[0])}
        grads |= {"dgain": None if x.rates.gain is None else self._tokens(x.rates.gain)}
        slow = [record.empty((self.N, self.H, 1, self.D), self.float) for _ in range(2)]
        A, bA = map(dense, d.anchor)
        more = {"end_W": W, "end_b": b, "end_A": A, "end_bA": bA, "marks": marks, "dweight": slow[0], "dshift": slow[1],
                "held": record.empty((self.N * self.H, EACH, mark(self.D)), self.float)}  # fmt: skip
        self._run(True, d.weights, grads | {"dout": dout}, more)
        dx = Tokens(grads["dq"], grads["dk"], grads["dv"], Rates((grads["deta"],), gain=grads["dgain"]))
        return dx, State(d.n - self.T, (W, b), tuple(zeros_like(self.xp, y) for y in (W, b))), tuple(slow)

    def _tokens(self, like: Array) -> Array:
        """Memory for tokens (N, H, T, D), tokens before heads."""
        return record.empty((self.N, self.T, self.H, like.shape[-1]), like.dtype).transpose(0, 2, 1, 3)

    def _states(self, count: int) -> list[Array]:
        """Memory for W and b, `count` times."""
        return [record.empty((self.N, self.H, rows, self.D), self.float) for rows in (self.D, 1) * count]

    def _run(self, back: bool, weights: Tree, tokens: dict[str, Any], arrays: dict[str, Any]) -> None:
        """A kernel for every head."""
        x = self.x
        given = {"q": x.q, "k": x.k, "v": x.v, "eta": x.rates.eta[0], "gain": x.rates.gain} | tokens
        if given.get("dout") is not None:
            given["dout"] = cast(self.xp, given["dout"], x.v.dtype)
        rows = {n: _aligned(y) for n, y in given.items()}
        W, b = map(dense, weights)
        names = ("end_W", "end_b", "end_A", "end_bA", "marks", "held", "dweight", "dshift")
        strided = ("q", "k", "v", "dout", "eta", "gain", "out", "dq", "dk", "dv", "deta", "dgain")
        packed = LINEAR.pack(
            **{n: NO_TOKENS if (y := rows.get(n)) is None else (y.data.ptr, *y.strides[:3]) for n in strided},
            **{n: address(arrays.get(n)) for n in names}, W=address(W), b=address(b), weight=address(self.weight),
            shift=address(self.shift), T=self.T, heads=self.H, groups=self.groups, mini_batch=self.f.mini_batch,
            before=int(self.f.read == "before"), eps=self.f.eps,
        )  # fmt: skip
        held = (*rows.values(), *arrays.values(), W, b, self.weight, self.shift)
        kernel(self.dtype, self.D, back).launch(self.N * self.H, packed, tuple(y for y in held if y is not None))


def _aligned(y: Array | None) -> Array | None:
    """Tokens whose rows are dense and begin at multiples of 16 bytes; rates as they are."""
    if y is None or y.shape[-1] == 1:
        return y
    is_dense = y.strides[-1] == y.itemsize
    return y if is_dense and not any(n % 16 for n in (y.data.ptr, *y.strides[:-1])) else dense(y)
