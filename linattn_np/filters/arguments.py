"""Arguments and results of adaptive filters: checked, in the compute dtype, and given back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from ..call.explain import Explanation, explain_call
from ..call.foreign import symbolic_bridge
from ..call.results import gradients_of
from ..runtime.arrays import Array, Library, Namespace, cast, compute_dtype, device, dtype_name, enter
from ..runtime.shapes import check_dtype
from ..runtime.values import is_finite, is_real, is_whole, shown
from ..spec import VariantSpec

OPTIONS = ("chunk_size", "backend", "num_threads", "precision")


class Filtered(NamedTuple):
    """Predictions and errors (..., T, V), the weights after the last token (..., K, V), and the state to go on from."""

    prediction: Any
    error: Any
    weights: Any
    state: Any


class RLSState(NamedTuple):
    """State of rls: S (..., K, V) and Z (..., K, K), sums of x^T d and x^T x; ridge (...), delta lambda^t."""

    S: Any
    Z: Any
    ridge: Any


class PastState(NamedTuple):
    """State of window_least_squares: the last x (..., N, K), d (..., N, V) and lambda (..., N), N = window."""

    x: Any
    d: Any
    rate: Any


class ProjectionState(NamedTuple):
    """State of affine_projection: weights W (..., K, V), the last x (..., N, K) and d (..., N, V), N = order - 1."""

    W: Any
    x: Any
    d: Any


class Signals(NamedTuple):
    """The checked arguments of a filter, in the compute dtype."""

    fn: str
    library: Library
    dtype: Any
    x: Array  # (..., T, K)
    d: Array  # (..., T, V)
    rate: Array  # (..., T)  mu or forgetting
    state: Any  # an array, a named tuple, or None
    numbers: dict[str, Any]  # eps, delta, window, ...
    options: dict[str, Any]  # of the core
    kinds: dict[str, Any]  # dtypes of the caller's arrays by name
    is_token: bool  # the caller's arrays are of one token, without T
    q: Any = None  # (..., T, K), queries

    @property
    def xp(self) -> Namespace:
        return self.library.xp


Pullback = Callable[[Filtered], tuple[Any, ...]]


class Filter(NamedTuple):
    """A filter: its name, its rate with a default, its numbers with defaults, how it is computed, own options.

    state: the named tuple of its state, None: one array. axes: of its parts; past(numbers) is their N.
    forgets: rates are numbers in (0, 1]. core(signals) returns (spec, keywords, saved) of the call that computes it,
    None: array calls do. compute(signals, gradients) returns (Filtered in the compute dtype, pullback or None); the
    pullback maps cotangents, None where there are none, to (dx, dd, drate, dstate), with dq behind them if the filter
    takes queries (queries).
    """

    name: str
    rate: str
    default: float | None
    numbers: Mapping[str, Any]
    core: Callable[[Signals], tuple[VariantSpec, dict[str, Any], Any]] | None
    compute: Callable[[Signals, bool], tuple[Filtered, Pullback | None]]
    more: tuple[str, ...] = ()
    state: Any = None
    axes: Mapping[str, str] = MappingProxyType({"state": "K V"})
    forgets: bool = False
    past: Callable[[Mapping[str, Any]], int] = lambda numbers: 0
    queries: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options of its core."""
        return () if self.core is None else (*OPTIONS, *self.more)

    def __call__(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any], is_token: bool = False) -> Filtered:
        s = self.enter(arrays, keywords, is_token)
        return given_back(s, self.compute(s, False)[0])

    def step(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Filtered:
        """One token, without T."""
        return self(arrays, keywords, is_token=True)

    def step_vjp(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Filtered, Callable[..., Any]]:
        """One token, without T, and its pullback."""
        return self.vjp(arrays, keywords, is_token=True)

    def explain(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Explanation:
        """The explanation of the call that computes it."""
        if self.core is None:
            return of_array_calls(self.name, self.enter(arrays, keywords))
        spec, call, _ = self.core(self.enter(arrays, keywords))
        return explain_call(spec, (), call)

    def vjp(
        self, arrays: tuple[Any, ...], keywords: Mapping[str, Any], is_token: bool = False
    ) -> tuple[Filtered, Callable[..., Any]]:
        """The result, and its pullback: gradients by input name."""
        s = self.enter(arrays, keywords, is_token)
        found, pull = self.compute(s, True)
        assert pull is not None

        def pullback(dprediction: Any = None, derror: Any = None, dweights: Any = None, dstate: Any = None) -> Any:
            """Gradients of x, d, the rate if it is an array, queries, and the state."""
            return self._gradients(s, pull(cotangents(s, found, (dprediction, derror, dweights, dstate))))

        return given_back(s, found), pullback

    def _gradients(self, s: Signals, grads: tuple[Any, ...]) -> Any:
        back, (dx, dd, drate, dstate, *dq) = s.library.give_back, grads
        one = {"x": dx, "d": dd, self.rate: drate} | dict(zip(["q"], dq, strict=False))
        if s.is_token:
            one = {n: y[..., 0] if n == self.rate else y[..., 0, :] for n, y in one.items()}
        named = [back(cast(s.xp, y, s.kinds[n])) if n in s.kinds else None for n, y in one.items()]
        state = None
        if s.state is not None:
            each = [back(cast(s.xp, y, s.kinds[n])) for n, y in parts(self, dstate).items()]
            state = type(s.state)(*each) if isinstance(s.state, tuple) else each[0]
        return gradients_of((*one, "state"), *named, state)

    def enter(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any], is_token: bool = False) -> Signals:
        """The checked arguments; is_token: without T."""
        fn, names = self.name, ("x", "d", self.rate)
        if len(arrays) > len(names):
            raise TypeError(f"{fn}: {len(arrays)} arrays were given by position, expected at most {', '.join(names)}")
        known = (*names, *(["q"] if self.queries else []), *self.numbers, "state", *self.options)
        for name in keywords:
            if name not in known:
                raise TypeError(f"{fn}: unknown option {name!r}, expected one of {', '.join(known)}")
        given = {self.rate: self.default, **self.numbers, **dict(zip(names, arrays, strict=False)), **keywords}
        for name in names:
            if given.get(name) is None:
                raise TypeError(f"{fn}: {name} is missing, expected the arrays {', '.join(names)}")
        numbers = {n: own_number(fn, n, given[n], default) for n, default in self.numbers.items()}
        rate = given[self.rate]
        each = {"x": given["x"], "d": given["d"], self.rate: None if is_real(rate) else rate, "q": given.get("q"),
                **parts(self, given.get("state"))}  # fmt: skip
        library, entered = enter(fn, each)
        for name, y in entered.items():
            if y is not None:
                check_dtype(fn, name, y)
        check_shapes(self, entered, numbers, is_token)
        dtype = compute_dtype(library.xp, *entered.values())
        kinds = {name: y.dtype for name, y in entered.items() if y is not None}
        x, d, array, q, *state = self._cast(library.xp, entered, dtype)
        if array is not None:
            check_rates(self, library.xp, array)
        if is_token:
            x, d, array = x[..., None, :], d[..., None, :], None if array is None else array[..., None]
            q = None if q is None else q[..., None, :]
        if array is None:
            one = number(fn, self.rate, rate, least=False)
            if self.forgets and not 0 < one <= 1:
                raise ValueError(f"{fn}: {self.rate} is {shown(rate)}, expected a number in (0, 1]")
            info = library.xp.finfo(dtype)
            if one > float(info.max) or (self.forgets and one < float(info.smallest_normal)):
                raise ValueError(f"{fn}: {self.rate} is {shown(rate)}, expected a number that its dtype holds")
            array = library.xp.full(x.shape[:-1], one, dtype=dtype, device=device(x))
        options = {n: keywords[n] for n in self.options if n in keywords}
        begin = self.state(*state) if len(state) > 1 else next(iter(state), None)
        return Signals(fn, library, dtype, x, d, array, begin, numbers, options, kinds, is_token, q)

    def _cast(self, xp: Namespace, entered: Mapping[str, Any], dtype: Any) -> list[Any]:
        return [None if y is None else cast(xp, y, dtype) for y in entered.values()]


def own_number(fn: str, name: str, x: Any, default: Any) -> Any:
    """A number of a filter: whole where its default is, None where that is None."""
    if type(default) is int:
        if not is_whole(x):
            raise ValueError(f"{fn}: {name} is {shown(x)}, expected a whole number from 1")
        return int(x)
    return None if default is None and x is None else number(fn, name, x, least=name in ("delta", "bandwidth"))


def number(fn: str, name: str, x: Any, least: bool) -> float:
    """An option that is a number; least: above 0."""
    if not is_finite(x) or x < 0 or (least and x == 0):
        raise ValueError(f"{fn}: {name} is {shown(x)}, expected a finite number {'> 0' if least else '>= 0'}")
    return float(x)


def check_rates(own: Filter, xp: Namespace, y: Array) -> None:
    """Raise ValueError unless an array of rates has the values that a number may have; arrays without numbers pass."""
    if symbolic_bridge((y,), {}) is not None:
        return
    right = (y > 0) & (y <= 1) if own.forgets else (y >= 0) & (y < float("inf"))
    if not bool(xp.all(right)):
        n = first_of(xp, ~right)
        wanted = "numbers in (0, 1]" if own.forgets else "finite numbers >= 0"
        raise ValueError(f"{own.name}: {own.rate} is {float(y[n]):.4g} at {n}, expected {wanted}")


def first_of(xp: Namespace, wrong: Array) -> tuple[int, ...]:
    """The index of the first True."""
    n, index = int(xp.argmax(xp.reshape(xp.astype(wrong, xp.int8), (-1,)))), []
    for size in reversed(wrong.shape):
        n, i = divmod(n, size)
        index.append(i)
    return tuple(reversed(index))


def parts(own: Filter, state: Any) -> dict[str, Any]:
    """The arrays of a state by name."""
    if own.state is None or state is None:
        return {} if state is None else {"state": state}
    names = own.state._fields
    if not isinstance(state, tuple) or len(state) != len(names):
        wanted = f"({', '.join(names)}) as a{'n' * (own.name == 'rls')} {own.state.__name__}"
        raise TypeError(f"{own.name}: state is a {type(state).__qualname__}, expected {wanted}")
    return {f"state.{n}": y for n, y in zip(names, state, strict=True)}


def check_shapes(own: Filter, arrays: Mapping[str, Any], numbers: Mapping[str, Any], is_token: bool) -> None:
    """Raise ValueError unless x is (..., T, K), d (..., T, V), and the others fit; is_token: all without T."""
    fn, x, d, least = own.name, arrays["x"], arrays["d"], 1 if is_token else 2
    if x.ndim < least or d.ndim < least or tuple(d.shape[:-1]) != tuple(x.shape[:-1]):
        expected = "(..., K) and (..., V)" if is_token else "(..., T, K) and (..., T, V)"
        raise ValueError(
            f"{fn}: x has shape {tuple(x.shape)} and d {tuple(d.shape)}, expected {expected}"
            + _missing_axes(x, d, is_token)
        )
    lead, T = x.shape[: x.ndim - least], () if is_token else x.shape[-2:-1]
    sizes = {"K": x.shape[-1], "V": d.shape[-1], "N": own.past(numbers)}
    wanted = {n: (*lead, *(sizes[letter] for letter in axes.split())) for n, axes in own.axes.items()}
    for name, shape in (wanted | {own.rate: (*lead, *T), "q": tuple(x.shape)}).items():
        y: Any = arrays.get(name)
        if y is not None and tuple(y.shape) != shape:
            raise ValueError(f"{fn}: {name} has shape {tuple(y.shape)}, expected {shape}")


def _missing_axes(x: Array, d: Array, is_token: bool) -> str:
    """How signals get the axis of channels that they lack; "" for other errors."""
    one, ways = "[..., None]" if is_token or max(x.ndim, d.ndim + 1) > 2 else "[:, None]", []
    if x.ndim == 1 and not is_token:
        x, ways = x[:, None], ["x[:, None] is (T, 1), la.delay_line(x, taps) is (T, taps)"]
    if d.ndim == x.ndim - 1 and tuple(d.shape) == tuple(x.shape[:-1]):
        ways.append(f"d{one} is one desired output")
    return f": {'; '.join(ways)}" if ways else ""


def cotangents(s: Signals, like: Filtered, given: tuple[Any, ...]) -> Filtered:
    """Cotangents in the compute dtype, None where there are none."""
    if all(y is None for y in given):
        raise TypeError(f"{s.fn}: the pullback got no cotangent, expected dprediction, derror, dweights or dstate")

    def one(name: str, y: Any, result: Any) -> Any:
        if y is None:
            return None
        is_signal = s.is_token and name in ("dprediction", "derror")
        result = result[..., 0, :] if is_signal else result
        if isinstance(result, tuple):
            names: Any = type(result)
            return names(*(one(f"{name}.{n}", *each) for n, *each in zip(names._fields, y, result, strict=True)))
        found = enter(s.fn, {name: y}, s.library)[1][name]
        check_dtype(s.fn, name, found)
        if tuple(found.shape) != tuple(result.shape):
            raise ValueError(f"{s.fn}: {name} has shape {tuple(found.shape)}, expected {tuple(result.shape)}")
        return cast(s.xp, found[..., None, :] if is_signal else found, s.dtype)

    return Filtered(*(one(f"d{n}", *each) for n, *each in zip(Filtered._fields, given, like, strict=True)))


def given_back(s: Signals, found: Filtered) -> Filtered:
    """A result in the caller's library; predictions and errors in the dtype of d."""
    back, kind = s.library.give_back, s.kinds["d"]
    state = found.state
    state = type(state)(*map(back, state)) if isinstance(state, tuple) else back(state)
    signals = ((z[..., 0, :] if s.is_token else z) for z in (found.prediction, found.error))
    y, e = (back(cast(s.xp, z, kind)) for z in signals)
    return Filtered(y, e, state if not isinstance(state, tuple) else back(found.weights), state)


def of_array_calls(fn: str, s: Signals) -> Explanation:
    """The explanation of a filter that no core computes: sums over each window, and a system for each token."""
    K, V, c = s.x.shape[-1], s.d.shape[-1], s.numbers["window"]
    each, tokens = 2.0 * c * K * (K + V) + 2 / 3 * K**3 + 2 * K * K * V, prod(s.x.shape[:-1])
    size = s.xp.finfo(s.dtype).bits // 8
    return Explanation(fn, "chunks", "sums and systems are array calls", {}, "a system for each token", None,
                       dtype_name(s.x), round(each * tokens), each, 2 * size * tokens * (K + V),
                       "a filter of array calls is not recorded")  # fmt: skip


# tokens of the core: the state before a token is read, so tokens are written one late, and there is one more of them


def tokens(s: Signals) -> dict[str, Array]:
    """q, k, v (..., T + 1, 1, .): token t reads with x_t and writes (x_{t-1}, d_{t-1}), the first one nothing."""
    return {"q": later(s.xp, s.x, last=True)[..., None, :], "k": later(s.xp, s.x)[..., None, :],
            "v": later(s.xp, s.d)[..., None, :]}  # fmt: skip


def later(xp: Namespace, y: Array, last: bool = False, axis: int = -2) -> Array:
    """y with one more token, of zeros: the first one, or the last."""
    shape = list(y.shape)
    shape[axis] = 1
    none = xp.zeros(tuple(shape), dtype=y.dtype, device=device(y))
    return xp.concat([y, none] if last else [none, y], axis=axis)


def result(s: Signals, out: Array, weights: Array, state: Any) -> Filtered:
    """The result from the core's output (..., T + 1, 1, V)."""
    y = out[..., :-1, 0, :]
    return Filtered(y, s.d - y, weights, state)


def dout_of(s: Signals, d: Filtered) -> Array:
    """The cotangent of the core's output; the error is d - y."""
    dy = s.xp.zeros_like(s.d) if d.prediction is None else d.prediction
    return later(s.xp, dy if d.error is None else dy - d.error, last=True)[..., None, :]


def pulled(grads: Any, d: Filtered) -> tuple[Array, Array]:
    """(dx, dd) from the core's gradients: x is query and key."""
    dx, dd = grads.q[..., :-1, 0, :] + grads.k[..., 1:, 0, :], grads.v[..., 1:, 0, :]
    return dx, dd if d.error is None else dd + d.error
