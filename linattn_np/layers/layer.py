"""A layer is a function of parameters and arrays with a gradient; layers are composed by naming their values.

    mlp = compose(("up",   linear(D, F),                 "x"),
                  ("act",  function(nn.squared_relu),    "up"),
                  ("down", linear(F, D),                 "act"))

Each line is y = f(parameters of that name, values of those names). The gradient is that of the lines in reverse:

    dy_a += the pullback of f_n, of the gradient of y_n           for every a that line n reads

Parameters are a dict of arrays; line "up" of line "mlp" of a block has "mlp/up/weight". States are a dict with the
same kind of paths.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec

import numpy as np

from ..call.results import Result, gradients_of
from ..call.step import without_time
from ..nn import replays
from ..ops.sums import added
from ..runtime import draws
from ..runtime.arrays import compat
from ..runtime.recorder import active, refuse
from ..runtime.unchanged import check_unchanged, mark, marked_by_caller
from ..runtime.values import is_real
from .init import Init, size

Array = Any
Named = dict[str, Any]  # arrays by path
Values = Sequence[Any]


class Mode(NamedTuple):
    """What is wanted besides the outputs."""

    pullback: bool = False
    states: bool = False


# run(mode, params, arrays, states) -> (outputs, final states, pullback)
# pullback(gradients of the outputs, of the final states) -> (of the parameters, of the arrays, of the states)
Pullback = Callable[[Values, Named], tuple[Named, Values, Named]]
Run = Callable[[Mode, Named, Values, Named], tuple[Values, Named, Any]]  # the pullback is None unless wanted


P = ParamSpec("P")


def made(make: Callable[P, Layer]) -> Callable[P, Layer]:
    """Decorator: a layer that `make` returns is pickled as the call that made it."""

    @functools.wraps(make)
    def maker(*args: P.args, **options: P.kwargs) -> Layer:
        layer = make(*args, **options)
        layer.call = functools.partial(maker, *args, **options)
        return layer

    return maker


class Layer:
    """y = layer(params, *arrays, state=None, return_state=False); la.vjp(layer, params, *arrays, ...), la.step.

    With return_state=True the result is (y, state), and the pullback takes dstate. Gradients are a named tuple: params
    (a dict by path), the arrays by name, and state. `init(rng)` draws the parameters, `count` is their number. A
    layer of the functions of la.layers is pickled as the call that made it.
    Raises ValueError for parameters that are missing, unknown or of another shape.
    """

    call: Callable[[], Layer] | None = None  # that made it

    def __init__(self, run: Run, parameters: Mapping[str, Init], given: Sequence[str], gives: Sequence[str] = ("y",),
                 name: str = "layer"):  # fmt: skip
        """given, gives: names of the arrays and of the outputs; an output that is alone is not in a tuple."""
        self.run, self.parameters, self.given, self.gives = run, dict(parameters), tuple(given), tuple(gives)
        self.__name__ = name

    @made
    def named(self, name: str, given: str = "") -> Layer:
        """The same under a name, and with other names of its arrays."""
        return Layer(self.run, self.parameters, given.split() or self.given, self.gives, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.call is None else (self.call, ())

    @property
    def count(self) -> int:
        """The number of parameters."""
        return sum(size(p.shape) for p in self.parameters.values())

    def init(self, rng: np.random.Generator, dtype: Any = np.float32) -> Named:
        """The parameters before training, NumPy arrays by path."""
        return {n: np.asarray(p.draw(rng, p.shape), dtype) for n, p in self.parameters.items()}

    def __call__(self, params: Named, *arrays: Array, state: Named | None = None, return_state: bool = False) -> Any:
        return self._computed(Mode(False, return_state), params, arrays, state)[0]

    def vjp(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
        """The rule of la.vjp: (result, pullback)."""
        return self._vjp(*arrays, **keywords)

    def _vjp(self, params: Named, *arrays: Array, state: Named | None = None, return_state: bool = False) -> Any:
        xs, marks = arrays, mark(dict(params) | dict(zip(self.given, arrays, strict=False)) | _arrays_of(state or {}))
        with marked_by_caller():
            found, pull = self._computed(Mode(True, return_state), params, arrays, state)

        def pullback(dout: Any = None, dstate: Named | None = None) -> Any:
            """Gradients: params by path, the arrays and the state."""
            check_unchanged(self.__name__, marks)
            if is_real(dout) and type(found) is np.ndarray and not found.ndim:
                dout = np.asarray(dout, found.dtype)
            dys = (dout,) if len(self.gives) == 1 else (dout or (None,) * len(self.gives))
            dp, dxs, dbegin = pull(dys, dstate or {})
            whole = {n: dp[n] if dp.get(n) is not None else 0 * params[n] for n in self.parameters}
            dxs = [0 * x if d is None and _is_floating(x) else d for x, d in zip(xs, dxs, strict=True)]
            return gradients_of(("params", *self.given, "state"), whole, *dxs, None if state is None else dbegin)

        return found, pullback

    def step(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """The rule of la.step: one token, arrays without their time axis, axis 1."""
        params, *xs = arrays
        found = self(params, *(x[:, None] for x in xs), **without_time(dict(keywords)))
        first = lambda y: tuple(a[:, 0] for a in y) if isinstance(y, tuple) else y[:, 0]  # noqa: E731
        return Result(first(found.out), found.state) if isinstance(found, Result) else first(found)

    def _computed(self, mode: Mode, params: Named, arrays: Values, state: Named | None) -> tuple[Any, Any]:
        """(the public result, the pullback of `run`)."""
        self._check(params, arrays)
        ys, ends, pull = self.run(mode, params, arrays, state or {})
        y = ys[0] if len(self.gives) == 1 else tuple(ys)
        return Result(y, ends) if mode.states else y, pull

    def _check(self, params: Named, arrays: Values) -> None:
        fn = self.__name__
        if len(arrays) != len(self.given):
            raise TypeError(f"{fn}: {len(arrays)} arrays were given, expected {', '.join(self.given)}")
        if not isinstance(params, Mapping):
            raise TypeError(f"{fn}: params is a {type(params).__qualname__}, expected a dict of arrays by path")
        for n in params:
            if n not in self.parameters:
                raise ValueError(f"{fn}: params has {n!r}, which is no parameter of the layer")
        for n, p in self.parameters.items():
            if n not in params:
                raise ValueError(f"{fn}: params has no {n!r}, expected an array of shape {p.shape}")
            if tuple(params[n].shape) != p.shape:
                raise ValueError(f"{fn}: {n} has shape {tuple(params[n].shape)}, expected {p.shape}")


_numbers = itertools.count()
Step = tuple[str, Layer, str]  # (names of the outputs, layer, names of its arrays); "name: outputs" names the step


@made
def compose(*steps: Step, given: str = "x", gives: str = "") -> Layer:
    """The steps one after the other; their parameters and states have the step's name before them: the first output,
    or what is before a colon, as in "project: q k v".

    given: names of the arrays. gives: names of the outputs, those of the last step if none is named. A step may give a
    name anew: later steps read the new value. Raises ValueError for a name that has no value, and for a parameter that
    two steps have.
    """
    lines, own_name = [_line(*step) for step in steps], replays.Named(f"layer {next(_numbers)}")
    inputs, outputs = given.split(), gives.split() or lines[-1].gives
    parameters = _parameters(lines, inputs)

    def run(mode: Mode, params: Named, xs: Values, states: Named) -> Any:
        if mode.states or not mode.pullback or states:
            return in_lines(mode, params, xs, states)

        def compute() -> tuple[Any, Any]:
            ys, _, pull = in_lines(mode, params, xs, {})

            def gradients(*dys: Any) -> Any:
                dparams, dxs, _ = pull(dys, {})
                return tuple(dparams.get(n) for n in parameters), tuple(dxs)

            return tuple(ys), gradients

        found, pull = replays.vjp_by_kernels(own_name, (*xs, *(params[n] for n in parameters)), compute)

        def pullback(dys: Values, dends: Named) -> tuple[Named, Values, Named]:
            dparams, dxs = pull(*dys)
            return dict(zip(parameters, dparams, strict=True)), dxs, {}

        return found, {}, pullback

    def in_lines(mode: Mode, params: Named, xs: Values, states: Named) -> Any:
        values, ends, pulls = dict(zip(inputs, xs, strict=True)), dict[str, Any](), []
        for line in lines:
            own = {n: params[path] for n, path in line.paths}
            begin = below(states, line.name) if states else {}
            ys, end, pull = line.layer.run(mode, own, [values[n] for n in line.given], begin)
            values.update(zip(line.gives, ys, strict=True))
            ends |= under(end, line.name)
            pulls.append(pull)

        def pullback(dys: Values, dends: Named) -> tuple[Named, Values, Named]:
            d, dparams, dstates = dict(zip(outputs, dys, strict=True)), dict[str, Any](), dict[str, Any]()
            for line, pull in zip(reversed(lines), reversed(pulls), strict=True):
                own, end = [d.pop(n, None) for n in line.gives], below(dends, line.name) if dends else {}
                if not end and all(dy is None for dy in own):
                    continue
                dp, dxs, begin = pull(own, end)
                dparams |= under(dp, line.name)
                dstates |= under(begin, line.name)
                for n, dx in zip(line.given, dxs, strict=True):
                    if dx is not None:
                        d[n] = dx if d.get(n) is None else plus(d[n], dx)
            return dparams, [d.get(n) for n in inputs], dstates

        return [values[n] for n in outputs], ends, pullback if mode.pullback else None

    return Layer(run, parameters, inputs, outputs)


@made
def chain(**layers: Layer) -> Layer:
    """Layers of one array, one after the other, under their names."""
    names = ["x", *layers]
    return compose(*((n, layer, names[i]) for i, (n, layer) in enumerate(layers.items())))


@made
def recomputed(layer: Layer) -> Layer:
    """The layer with gradient checkpointing: between forward and pullback its arrays and states alone are kept.

    The pullback computes the forward once more, with the same bits. In a stack of such layers the residuals of one
    exist at a time. A layer must depend on its arguments alone; seeds that pieces draw from a generator are kept.
    Chen et al., arXiv 1604.06174.
    """

    def run(mode: Mode, params: Named, xs: Values, states: Named) -> Any:
        if not mode.pullback:
            return layer.run(mode, params, xs, states)
        refuse("a layer is computed again")  # a plan of an outer layer would keep the residuals
        with draws.kept() as seeds:
            ys, ends, _ = layer.run(mode, params, xs, states)  # the kernels of training, whose bits may differ

        def pullback(dys: Values, dends: Named) -> tuple[Named, Values, Named]:
            with draws.repeated(seeds), marked_by_caller():
                _, _, pull = layer.run(mode, params, xs, states)
            return pull(dys, dends)

        return ys, ends, pullback

    return Layer(run, layer.parameters, layer.given, layer.gives, layer.__name__)


def plus(x: Array, y: Array) -> Array:
    """x + y of one shape; of CuPy arrays, and in a recorded layer, by a kernel."""
    if active.recorder is None and not compat.is_cupy_array(x):
        return x + y
    return added(compat.array_namespace(x), x, y)


class _Line(NamedTuple):
    """A step of `compose`."""

    name: str
    gives: list[str]
    layer: Layer
    given: list[str]
    paths: list[tuple[str, str]]  # of its parameters: without its name, with it


def _line(outputs: str, layer: Layer, names: str) -> _Line:
    name, _, gives = outputs.rpartition(":")
    name = name or gives.split()[0]
    paths = list(zip(layer.parameters, under(layer.parameters, name), strict=True))
    return _Line(name, gives.split(), layer, names.split(), paths)


def _parameters(lines: Sequence[_Line], inputs: Sequence[str]) -> dict[str, Init]:
    """The parameters of all steps by path."""
    parameters, known = dict[str, Init](), set(inputs)
    for line in lines:
        if missing := [n for n in line.given if n not in known]:
            raise ValueError(f"compose: {line.name} reads {missing[0]!r}, expected one of {', '.join(sorted(known))}")
        own = under(line.layer.parameters, line.name)
        if twice := parameters.keys() & own.keys():
            raise ValueError(f"compose: two steps have the parameter {min(twice)!r}, expected names of their own")
        parameters |= own
        known |= set(line.gives)
    return parameters


def below(named: Mapping[str, Any], name: str) -> Named:
    """The entries under a name, without it."""
    n = len(name) + 1
    return {path[n:]: x for path, x in named.items() if path.startswith(f"{name}/")}


def under(named: Mapping[str, Any], name: str) -> Named:
    """The entries with a name before them."""
    return {f"{name}/{path}": x for path, x in named.items()}


def _arrays_of(states: Mapping[str, Any]) -> Named:
    """States by path, the parts of a tuple under its own."""
    parts = {f"{n}/{i}": x for n, s in states.items() for i, x in enumerate(s if isinstance(s, tuple) else ())}
    return parts | {n: s for n, s in states.items() if not isinstance(s, tuple)}


def _is_floating(x: Any) -> bool:
    return "float" in str(getattr(x, "dtype", ""))
