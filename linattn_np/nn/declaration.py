"""How a piece is declared: one function computes the result and returns it with its pullback.

    @piece(x="... D", weight="D?")
    def rms_norm(c, x, weight=None, *, eps=1e-6):
        ...
        return out, pullback            pullback(dout) -> gradients by name

The public function has the same arguments without `c`. It takes arrays of any library, checks them against their axes,
computes in float32 or float64, and returns the dtype of its first floating array. Letters of axes are sizes, "..." is
any number of axes, "?" an array that may be left out; "whole ..." is an array of integers, without a gradient. A piece
with an array `state` returns (out, final states), pullback(dout, dstate): the rest is in states.py. An option that is
a random generator comes to the body as a seed drawn from it, so that a recomputed call draws the same numbers.
What la.explain and la.check say of a piece is in explained.py, the option `out` in destination.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..call import lse
from ..call.foreign import bridge_of, calls_of_loops
from ..call.results import Result, apart, gradients_of
from ..ops.sequences import Sequences
from ..runtime import draws, threads
from ..runtime.arrays import STORAGE, Array, Library, Namespace, cast, compute_dtype, dtype_name, enter, is_cupy
from ..runtime.doorway import expect
from ..runtime.shapes import check_offsets
from ..runtime.unchanged import check_unchanged, mark
from ..runtime.values import check_word, is_real, is_whole, shown
from . import destination, explained, replays, states

WHOLE, ANY = "whole ", "...?"  # in front of the axes of integers; an array whose axes the body checks
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
BACKENDS = ("reference", "numba")
COMMON: dict[str, Any] = {"out": None, "backend": None, "num_threads": None}  # options of every piece
EMPTY = inspect.Parameter.empty
Pullback = Callable[..., Any]
Body = Callable[..., tuple[Any, Pullback]]


class Call(NamedTuple):
    """What a body gets besides its arguments."""

    fn: str
    library: Library
    dtype: Any  # of the computation
    sizes: dict[str, Any]  # by letter
    kinds: dict[str, Any]  # dtypes of the caller's arrays
    offsets: list[int] | None  # cu_seqlens
    compiled: bool  # whether loops compute it: NumPy arrays that are not empty
    on_device: bool  # whether CUDA kernels do: CuPy arrays that are not empty
    stored: bool  # and whether they take the arrays as these are stored
    states: states.States | None

    @property
    def xp(self) -> Namespace:
        return self.library.xp

    @property
    def reads_states(self) -> bool:
        """Whether kernels read states, and their rows of a pool, where they lie."""
        if self.states is None or not (self.stored or self.compiled) or not self.states.is_dense:
            return False
        return self.stored or self.kinds["state"] == self.dtype

    @property
    def sequences(self) -> Sequences:
        """Which tokens belong together."""
        return Sequences(self.xp, None if self.offsets is None else tuple(self.offsets))


class Kind(NamedTuple):
    """What is known of a result before it is computed."""

    out: str | Callable[[Mapping[str, Any]], str] = ""  # its axes, or those for these arguments; "": of the first array
    wide: bool = False  # it keeps the dtype of the computation
    slots: Callable[[Mapping[str, Any]], int] | None = None  # of a final state, from the sizes, without an initial one
    stored: Callable[[Mapping[str, Any]], bool] = lambda given: False  # whether CUDA kernels take arrays of any dtype
    has_lse: bool = False  # its last channel is a second result (call/lse.py)
    array_calls: Callable[[Mapping[str, Any]], str] = lambda given: ""  # why loops do not compute these arguments
    operations: Callable[[Mapping[str, Any]], int] = lambda sizes: 0  # of its products, from the sizes
    doubts: Callable[..., Iterable[Any]] = lambda c, arrays, given: ()  # findings besides NaN and inf
    recheck: Callable[[Mapping[str, Any]], bool] | None = None  # of integers: raises, or whether kernels may compute
    infinite: tuple[str, ...] = ()  # arrays in which -inf is a number like others


class Piece:
    """A declared piece; `__call__` and `vjp` take the arguments of its public function."""

    function: Callable[..., Any]  # the public one

    def __init__(self, axes: Mapping[str, str], body: Body, kind: Kind):
        """axes: of each array by name. kind: what is known of the result."""
        own = list(inspect.signature(body).parameters.values())[1:]
        self.name, self.body, self.axes, self.kind = body.__name__, body, dict(axes), kind
        more = {n: x for n, x in COMMON.items() if not (kind.has_lse and n == "out")}
        more |= {n: x for n, x in states.OPTIONS.items() if n != "state"} if "state" in axes else {}
        kinds = {
            "backend": "str | None",
            "num_threads": "int | None",
            "return_state": "bool",
            "overwrite_state": "bool",
        }
        own += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=x, annotation=kinds.get(n, "Any"))
                for n, x in more.items()]  # fmt: skip
        self.signature = inspect.Signature(own, return_annotation=Any)
        self.positional = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.defaults = {p.name: p.default for p in own}
        self.whole = [n for n, each in axes.items() if each.startswith(WHOLE)]
        self.names = tuple(n for n in axes if n not in self.whole)  # of the arrays that have a gradient
        hidden = {*more, "cu_seqlens"}  # options that a body does not see
        self.seen = tuple(n for n in self.defaults if n not in hidden)
        self.is_replayed = "rng" not in self.defaults
        self._named, self._one = replays.Named(f"nn.{self.name}"), replays.Named(f"nn.{self.name} of one token")

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        return self._replayed(self._named, self._computed, arrays, keywords)

    def _replayed(
        self, named: replays.Named, compute: Any, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        """compute(arrays, keywords), or what was recorded of it."""
        if self.kind.recheck is not None:
            replays.refuse_inside(self.name)
        if (signature := self._signature(named, arrays, keywords)) is None:
            return compute(arrays, keywords)
        if (found := replays.known(signature)) is not None:
            return found
        own = self if named is self._named else None
        return replays.recorded(signature, own, arrays, keywords, lambda: compute(arrays, keywords))

    def signature_of(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a recording of the call is found by; None if it cannot be recorded."""
        return self._signature(self._named, arrays, keywords)

    def _signature(self, named: replays.Named, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        if not self.is_replayed or keywords.get("cu_seqlens") is not None:
            replays.refuse_inside(self.name)
        return replays.signature_of(named, arrays, keywords) if self.is_replayed else None

    def _computed(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        given = self.bound(arrays, keywords)
        if (bridge := bridge_of((), given)) is not None:
            found = bridge.apply(self.name, self, self._rule, self.names, given)
            if found is not NotImplemented:
                return found
        if (traced := calls_of_loops(given)) is not None:
            return traced.run(self, given)
        return self.finished(given, *self.entered(given))

    def finished(self, given: Mapping[str, Any], c: Call, own: dict[str, Any]) -> Any:
        """The public result of a checked call."""
        to = destination.of_call(self, c, given, own)
        with threads.limited(given["num_threads"]), destination.filled(self, c, to, own):
            return self._given_back(c, self.body(c, **own)[0], to, given.get("out"))

    def vjp(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Pullback]:
        """The rule of la.vjp: (result, pullback)."""
        signature = self.signature_of(arrays, keywords)
        if (plan := replays.plan_of_vjp(signature)) is not None:
            by_name = dict(zip(self.positional, arrays, strict=False)) | dict(keywords)
            if (found := self._by_plan(plan, signature, by_name)) is not None:
                return found
        given = self.bound(arrays, keywords)
        if (bridge := bridge_of((), given)) is not None:
            found = bridge.run_vjp(self.name, None, self._rule, (), given)
            if found is not NotImplemented:
                return found
        if (traced := calls_of_loops(given)) is not None:
            return traced.run_vjp(self, given)
        return self._rule((), given, signature)

    def step(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """The rule of la.step, for pieces with a state: one token, x (..., D)."""
        return self._replayed(self._one, self._of_one_token, arrays, keywords)

    def _of_one_token(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        found, to = self(**self._with_time(arrays, keywords)), self.bound(arrays, keywords)["out"]
        out = _out(found)[..., 0, :] if to is None else to
        return Result(out, found.state) if isinstance(found, Result) else out

    def step_vjp(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Pullback]:
        """The same with its pullback."""
        found, pull = self.vjp((), self._with_time(arrays, keywords))

        def pullback(dout: Any = None, dstate: Any = None) -> Any:
            """Gradients by input name; None for what was not given."""
            d = None if dout is None else dout[..., None, :]
            grads = pull(d, dstate) if isinstance(found, Result) else pull(d)
            return grads._replace(x=grads.x[..., 0, :])

        out = Result(found.out[..., 0, :], found.state) if isinstance(found, Result) else found[..., 0, :]
        return out, pullback

    def _with_time(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
        given = self.bound(arrays, keywords)
        if not getattr(given["x"], "ndim", 1):
            raise ValueError(f"{self.name}: x has shape (), expected (..., D)")
        return given | {n: given[n][..., None, :] for n in ("x", "out") if hasattr(given[n], "shape")}

    def _rule(self, _: Any, given: Mapping[str, Any], signature: Any = None) -> tuple[Any, Pullback]:
        """(result, pullback) of arguments by name; signature: of a call that has no plan."""
        for name in ("overwrite_state", "state_rows"):
            if given.get(name):
                raise ValueError(f"{self.name}: {name} was given to vjp, expected a state for each sequence, "
                                 "which is not overwritten: the pullback needs it")  # fmt: skip
        if given.get("out") is not None:
            raise ValueError(f"{self.name}: out was given to a call that is differentiated, expected None")
        if signature is not None:
            return self._in_full(given, signature)
        signature = self.signature_of((), given)
        plan = replays.plan_of_vjp(signature)
        found = None if plan is None else self._by_plan(plan, signature, dict(given))
        return self._in_full(given, signature) if found is None else found

    def _in_full(self, given: Mapping[str, Any], signature: Any, plan: Any = None) -> tuple[Any, Pullback]:
        """(result, pullback), recorded under a signature if they can be replayed; plan: whose checks are known."""
        marks = mark({n: given[n] for n in self.names})
        if self.kind.recheck is not None:
            replays.recheck_inside(self.name, self.kind.recheck, given)
        recorder = None if signature is None else replays.recorder(signature[3] is not None)
        with recorder or contextlib.nullcontext(), threads.limited(given["num_threads"]):
            c, own = (plan or self).entered(given)  # which casts
            computed, pull = self.body(c, **own)
            result = self._given_back(c, computed)
        otherwise = None if signature is None else replays.checked(signature, self, (), given)
        residuals = replays.recorded_forward(signature, recorder, result, pull, otherwise)
        shapes = {"dout": tuple(_out(computed).shape)}
        if c.states is not None and c.states.returned:
            shapes["dstate"] = tuple(computed.state.shape)

        def pullback(*cotangents: Any, **named: Any) -> Any:
            """Gradients by input name; None for what was not given."""
            check_unchanged(self.name, marks)
            each = self._cotangents(c, shapes, cotangents, named)

            def computed() -> Any:
                with threads.limited(given["num_threads"]):
                    grads = pull(*each)
                found = apart(c.xp, [self._gradient(c, n, own[n], grads.get(n)) for n in self.names], each)
                return gradients_of(self.names, *(None if d is None else c.library.give_back(d) for d in found))

            return replays.pulled(residuals, tuple(each), computed)

        return result, pullback

    def _by_plan(self, plan: Any, signature: Any, by_name: dict[str, Any]) -> tuple[Any, Pullback] | None:
        """(result, pullback) by the plan of a vjp; None if it must be computed in full. by_name: what was given."""
        if type(plan) is replays.Checked:
            return self._in_full(self.defaults | by_name, None, plan)
        on_host = signature[3] is None  # the host does not read integers of a device
        if on_host and self.kind.recheck is not None and not self.kind.recheck(self.defaults | by_name):
            return None
        if (found := plan(signature[1], signature[3])) is None:
            return None
        (result, residuals), marks = found, mark({n: by_name.get(n) for n in self.names})
        parts = result if isinstance(result, Result) else (result,)
        shapes = {n: tuple(y.shape) for n, y in zip(("dout", "dstate"), parts, strict=False)}

        def pullback(*cotangents: Any, **named: Any) -> Any:
            """Gradients by input name; None for what was not given."""
            check_unchanged(self.name, marks)
            given_all = not named and len(cotangents) == len(shapes)
            if given_all and (found := residuals.pullback(cotangents)) is not None:
                return found
            given = self.defaults | by_name
            c, _ = (plan.otherwise or self).entered(given)
            each = tuple(self._cotangents(c, shapes, cotangents, named))
            if (found := residuals.pullback(each)) is not None:
                return found
            return self._in_full(given, signature)[1](*each)  # of another layout: the forward, too

        return result, pullback

    def bound(self, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument by name.   Raises TypeError for unknown, repeated and missing ones."""
        fn, names = self.name, self.positional
        if len(arrays) > len(names):
            raise TypeError(f"{fn}: {len(arrays)} arrays were given by position, expected at most {len(names)}: "
                            f"{', '.join(names)}")  # fmt: skip
        given = dict(zip(names, arrays, strict=False))
        for name, x in keywords.items():
            if name in given:
                raise TypeError(f"{fn}: {name} was given twice, by position and by keyword")
            if name not in self.defaults:
                raise TypeError(f"{fn}: unknown option {name!r}, expected one of {', '.join(self.defaults)}")
            given[name] = x
        given = self.defaults | given
        for name, x in given.items():
            if x is EMPTY or (x is None and self.defaults[name] is EMPTY):
                expected = f"the arrays {', '.join(names)}" if name in names else "it by keyword"
                raise TypeError(f"{fn}: {name} is missing, expected {expected}")
            if isinstance(x, np.random.Generator):
                given[name] = draws.seed_of(x)
        return given

    def entered(self, given: Mapping[str, Any]) -> tuple[Call, dict[str, Any]]:
        """The call, and the arguments of the body: arrays in the dtype of the computation."""
        fn = self.name
        check_word(fn, "backend", given["backend"], BACKENDS)
        if given["num_threads"] is not None and not is_whole(given["num_threads"]):
            raise ValueError(f"{fn}: num_threads is {shown(given['num_threads'])}, expected a whole number from 1")
        for name, default in self.defaults.items():
            if isinstance(default, bool) and not isinstance(given[name], bool):
                raise TypeError(f"{fn}: {name} is {shown(given[name])}, expected True or False")
        library, entered = enter(fn, {n: given[n] for n in self.axes})
        sizes, offsets = self._sizes(entered), None
        if given.get("cu_seqlens") is not None:
            offsets = check_offsets(fn, given["cu_seqlens"], {**sizes})
        own_states = None
        if "state" in self.axes:
            N = None if offsets is None else len(offsets) - 1
            own_states = states.states_of(fn, library, given, entered["state"], sizes | {"tail": self.axes["state"]}, N)
        floating = {n: entered[n] for n in self.names}
        dtype = compute_dtype(library.xp, *floating.values())
        kinds_of = {n: x.dtype for n, x in floating.items() if x is not None}
        first = next(iter(floating.values()))
        compiled = type(first) is np.ndarray and first.size > 0 and given["backend"] != "reference"
        on_device = is_cupy(library.xp) and first.size > 0 and given["backend"] != "reference" and _are_known(floating)
        own = {**given, **entered}
        stored = on_device and self.kind.stored(own)
        c = Call(fn, library, dtype, sizes, kinds_of, offsets, compiled, on_device, stored, own_states)
        return c, self.own(c, own)

    def own(self, c: Call, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the body, of those that were checked."""
        own = {n: given[n] for n in self.seen}
        if c.states is not None and not c.reads_states:
            own["state"] = c.states.begin(c.library)
        if c.compiled:
            from ..ops.cpu import formulas  # noqa: F401   by which `cast` converts, so that it can be recorded
        if not c.stored:
            own |= {n: cast(c.xp, x, c.dtype) for n in self.names if (x := own[n]) is not None}
        return own

    def _sizes(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes by letter.   Raises TypeError or ValueError for arrays that do not fit their axes."""
        sizes: dict[str, Any] = {}
        for name, axes in self.axes.items():  # in order: the first one binds most letters
            if name == "state":
                continue
            kinds, known = INTEGERS if name in self.whole else STORAGE, {} if axes == ANY else sizes
            found = expect(self.name, known, kinds, **{name: (arrays[name], axes.removeprefix(WHOLE))})
            sizes = sizes if axes == ANY else found
        return sizes

    def results(self, keywords: Mapping[str, Any]) -> list[tuple[tuple[int, ...], str]]:
        """(shape, dtype) of out, and of the final states with return_state, of arrays without numbers."""
        given = self.bound((), keywords)
        sizes, floats = self._sizes(given), [given[n] for n in self.names if given[n] is not None]
        axes = self.kind.out(given) if callable(self.kind.out) else self.kind.out or next(iter(self.axes.values()))
        shape = [m for n in axes.split() for m in (sizes[n] if n == "..." else (sizes[n[:1]] + n.endswith("+1"),))]
        wide = "float64" if any(dtype_name(x) == "float64" for x in floats) else "float32"
        found = [(tuple(shape), wide if self.kind.wide else dtype_name(floats[0]))]
        if given.get("return_state"):
            state, offsets = given["state"], given.get("cu_seqlens")
            slots = state.shape[-2] if state is not None else self.kind.slots(sizes) if self.kind.slots else 0
            lead = sizes["..."] if offsets is None else (len(offsets) - 1,)
            found.append(((*lead, slots, sizes["D"]), dtype_name(floats[0] if state is None else state)))
        return found

    def kind_of(self, c: Call) -> Any:
        """The dtype of the result."""
        return c.dtype if self.kind.wide else next(iter(c.kinds.values()))

    def _given_back(self, c: Call, computed: Any, to: Any = None, theirs: Any = None) -> Any:
        """The public result: out in the dtype of the first floating array, a state in its own.

        to: the array that the result is written to, `theirs` is the caller's.
        """
        kind, back = self.kind_of(c), c.library.give_back
        out = cast(c.xp, _out(computed), kind)
        out = back(np.asarray(out) if isinstance(out, np.generic) else out) if to is None else destination.put(
            c.xp, to, out, theirs)  # fmt: skip
        if c.states is None or not (c.states.returned or c.states.overwritten):
            return out
        end = back(c.states.end(c.library, cast(c.xp, computed.state, c.kinds.get("state", kind))))
        return Result(out, end) if c.states.returned else out

    def _gradient(self, c: Call, name: str, x: Any, d: Any) -> Any:
        if x is None:
            return None
        d = c.xp.zeros_like(x) if d is None else d
        return cast(c.xp, d, c.kinds[name])

    def _cotangents(self, c: Call, shapes: Mapping[str, Any], given: Any, named: Mapping[str, Any]) -> list[Any]:
        """In the dtype of the computation, None where there is none."""
        fn, names = self.name, list(shapes)
        if len(given) > len(names):
            raise TypeError(f"{fn}: the pullback got {len(given)} cotangents, expected at most {', '.join(names)}")
        each = dict(zip(names, given, strict=False))
        for name, d in named.items():
            if name not in names or name in each:
                raise TypeError(f"{fn}: the pullback got {name}, expected each of {', '.join(names)} once")
            each[name] = d
        for name, d in each.items():
            if is_real(d) and shapes[name] == ():
                each[name] = c.xp.asarray(d, dtype=c.dtype, device=c.library.device)
        if all(each.get(n) is None for n in names):
            raise TypeError(f"{fn}: the pullback got no cotangent, expected {' or '.join(names)}")
        _, entered = enter(fn, each, c.library)
        for name, d in entered.items():
            if d is not None:
                expect(fn, None, STORAGE, **{name: (d, "...")})
                if tuple(d.shape) != shapes[name]:
                    raise ValueError(f"{fn}: {name} has shape {tuple(d.shape)}, expected {shapes[name]}")
        wide = lambda d: d if c.stored else cast(c.xp, d, c.dtype)  # noqa: E731
        return [None if entered.get(n) is None else wide(entered[n]) for n in names]


def _are_known(arrays: Mapping[str, Any]) -> bool:
    """Whether CUDA kernels read these CuPy arrays."""
    from ..ops.cuda.formulas import takes

    return takes(*arrays.values())


def always(_: Any) -> bool:
    """Kind.stored: of all arguments."""
    return True


def _out(computed: Any) -> Array:
    return computed.out if isinstance(computed, Result) else computed


PIECES: dict[str, Piece] = {}  # by name


def _with_lse(own: Piece) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(function, vjp) of a piece that computes two results as one array."""

    def like(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        return arrays[0] if arrays else keywords[own.positional[0]]

    def call(*arrays: Any, **keywords: Any) -> Any:
        return lse.split(own(*arrays, **keywords), like(arrays, keywords))

    def rule(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Pullback]:
        return lse.split_vjp(own.name, own.vjp(arrays, keywords), like(arrays, keywords))

    return call, rule


def piece(kind: Kind | None = None, /, **axes: str) -> Callable[[Body], Callable[..., Any]]:
    """Decorator: the public function of a body; axes: of each array by name, also of those given by keyword."""

    def decorate(body: Body) -> Callable[..., Any]:
        own = Piece(axes, body, kind or Kind())
        call, rule = _with_lse(own) if own.kind.has_lse else (own, own.vjp)

        @functools.wraps(body)
        def function(*arrays: Any, **keywords: Any) -> Any:
            return call(*arrays, **keywords)

        function.vjp, function.piece = rule, own  # type: ignore[attr-defined]
        for rule_of in (explained.explain, explained.check):
            setattr(function, rule_of.__name__, functools.partial(rule_of, own))
        if "state" in axes:
            function.step, function.step_vjp = own.step, own.step_vjp  # type: ignore[attr-defined]
        function.__signature__ = own.signature  # type: ignore[attr-defined]
        own.function, PIECES[own.name] = function, own
        return function

    return decorate
