"""Large calls computed some heads at a time: heads do not meet, and each has the bits that it has in a whole call.

The pullback computes a part forwards again where a token writes and reads several rows, or features of rows. Else it is
a call of 16-bit numbers, of which a part keeps between the passes what its core keeps beside its inputs. Keys and
queries that all heads share are given to every part; their gradients are summed, in the dtype of the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..ops.host import has_compiler, kernels, write
from ..ops.sums import added
from ..runtime.arrays import NARROW, Array, dtype_name, gradient_like, is_numpy
from ..runtime.recorder import refuse
from ..runtime.shapes import flatten, unflatten
from ..runtime.unchanged import check_unchanged, mark
from ..spec import Call
from .binding import inputs_of
from .parts import INPUTS, exchanged
from .pieces_vjp import checked_rows
from .positions import checked
from .results import Result, cotangents, finished, form_of, gradients, gradients_of, returned

LEAST, FEWEST = 1 << 20, 2  # numbers of the rows of a part, and its heads, at least

Heads = tuple[int, int]  # the first one, one past the last


def parts_of(call: Call) -> list[Heads]:
    """The heads of the parts of a call, alike whatever its batch is; one part if it is computed as a whole."""
    sizes, options, change = call.sizes, call.options, call.spec.change
    H, shared = sizes.get("H", 0), [sizes.get(n, 1) for n in ("Hk", "Hq")]
    is_plain = is_numpy(call.xp) and call.plan.causal and has_compiler() and options["backend"] in (None, "numba")
    is_new = call.rows is None and not options["overwrite_state"] and options["return_states_at"] is None
    if not call.spec.micro_steps and dtype_name(getattr(call, change.value)) not in NARROW:
        return [(0, H)]
    if not (change.by_heads and is_plain and is_new) or options["layout"] != "time_first":
        return [(0, H)]
    if getattr(call, str(change.query)) is None:
        return [(0, H)]
    most = min(H * sizes["T"] * max(sizes["K"], sizes["V"]) // LEAST, H // FEWEST)
    count = max(n for n in range(1, max(most, 1) + 1) if all(m % n == 0 or m == 1 for m in (H, *shared)))
    each = H // count
    return [(n, n + each) for n in range(0, H, each)] if count > 1 else [(0, H)]


def forward(call: Call, parts: list[Heads]) -> Any:
    """The public result."""
    return returned(call, _results(call, parts))


def vjp(call: Call, parts: list[Heads], given: Mapping[str, Any], limit: Any, pull: Callable[..., Any]) -> Any:
    """(the public result, pullback); arguments as those of parts.vjp."""
    spec, kept = call.spec, list[Any]()
    with limit():
        if spec.micro_steps or spec.state.wide:
            result, kept = _results(call.changed(plan=call.plan._replace(gradients=False)), parts), [None] * len(parts)
        else:
            result = _results(call, parts, kept)
    form, marks, call = form_of(call.library, result.out), mark(given), call.changed(recorder=None)

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        if dout is None and dstate is None:
            raise TypeError(f"{spec.name}: the pullback got neither dout nor dstate, expected at least one")
        check_unchanged(spec.name, marks)
        d_out, d_state = checked_rows(call, dout, form), checked(call, "dstate", dstate, result.state)
        found = _Wholes(call)
        with limit():
            for (heads, own), computed in zip(_each(call, parts), kept, strict=True):
                _transpose(found, heads, own, _computed(own) if computed is None else computed, pull, d_out, d_state)
        names = (*spec.arrays, "state")
        return gradients_of(names, *(found.get(n) for n in names))

    return returned(call, result), pullback


def _results(call: Call, parts: list[Heads], kept: list[Any] | None = None) -> Result:
    """The public out and state. Appends what the pullback needs of each part to `kept`."""
    found = _Wholes(call)
    for heads, own in _each(call.changed(options=call.options | {"return_state": True}), parts):
        core, out, end, residuals = _computed(own)
        if kept is not None:
            kept.append((core, out if call.spec.change.keeps_out else None, end, residuals))
        result = finished(own, out, end)
        found.put("out", heads, result.out)
        found.put_state(heads, result.state)
    return Result(found.get("out"), found.get("state"))


def _computed(own: Call) -> tuple[Any, Any, Any, Any]:
    """(core, its output, its final state, residuals without its inputs) of a part."""
    x = inputs_of(own)
    out, end, residuals = x.computation.forward(own.name, x, own.plan, own.initial, own.options["backend"])
    return x.computation, out, end, exchanged(residuals, x, INPUTS)


def _each(call: Call, parts: list[Heads]) -> Iterator[tuple[Heads, Call]]:
    """The parts, with the call on each of them."""
    refuse("a large call is computed some heads at a time")
    found, library, pack = _Wholes(call), call.library._replace(give_back=lambda x: x), call.spec.state.pack
    for heads in parts:
        arrays = {name: found.cut(name, getattr(call, name), heads) for name in call.spec.arrays}
        sizes = call.sizes | {n: -(-call.sizes[n] // len(parts)) for n in ("H", "Hk", "Hq") if n in call.sizes}
        state = None if call.state is None else found.cut_state(call.state, heads)
        own = call.changed(**arrays, sizes=sizes, library=library, recorder=None, given_state=state, state=state)
        own.initial = state if pack is None else pack(own, state)
        yield heads, own


def _transpose(
    found: _Wholes, heads: Heads, own: Call, computed: Any, pull: Callable[..., Any], dout: Any, dstate: Any
) -> None:
    """Add the gradients of a part, from those of the results and what `_computed` returned."""
    core, out, end, residuals = computed
    dout = found.cut("out", dout, heads)
    dstate = None if dstate is None else found.cut_state(dstate, heads)
    form = None if dout is None else (tuple(dout.shape), False)
    given = cotangents(own, dout, dstate, form, end)
    grads, begin = pull(own, core.backward, exchanged(residuals, INPUTS, inputs_of(own)), out, given)
    of_part = gradients(own, {n: y for n, y in grads.items() if not found.is_shared(n)}, begin)
    for name, y in of_part._asdict().items():
        if name == "state":
            found.put_state(heads, y)
        elif found.is_shared(name):
            found.add(name, grads.get(name))
        else:
            found.put(name, heads, y)


class _Wholes:
    """Arrays by name, put together from those of parts; of arrays that all heads share, sums."""

    def __init__(self, call: Call):
        self.call, self.arrays, spec = call, dict[str, Array](), call.spec
        kind = spec.state.type_of(call.options)
        self.parts: tuple[str, ...] = ("state",) if kind is None else kind._fields
        states = {f"state.{n}": axes for n, axes in (spec.state.axes or spec.core.STATE_AXES).items()}
        value = spec.arrays[str(spec.change.value)].axes
        each = {n: a.axes for n, a in spec.arrays.items()} | states | {"out": value}
        self.axes = {n: _axis(axes.split("|")[0].split(), call.sizes) for n, axes in each.items()}

    def is_shared(self, name: str) -> bool:
        """Whether all heads share an array."""
        return name != "state" and self.axes[name] is None

    def cut(self, name: str, x: Array | None, heads: Heads) -> Array | None:
        """The heads of a part of an array."""
        axis = self.axes[name]
        if x is None or axis is None:
            return x
        groups, H = x.shape[axis], self.call.sizes["H"]
        part = slice(heads[0] * groups // H, heads[1] * groups // H)
        return x[(..., part, *(slice(None),) * (-1 - axis))]

    def cut_state(self, state: Any, heads: Heads) -> Any:
        """The heads of a part of a state."""
        return unflatten(state, [self.cut(f"state.{n}", y, heads) for n, y in self._parts_of(state)])

    def put(self, name: str, heads: Heads, y: Array | None) -> None:
        """Copy a part of an array to its place."""
        axis = self.axes[name]
        if y is None or axis is None:
            return
        if name not in self.arrays:
            shape, H = list(y.shape), self.call.sizes["H"]
            shape[axis] = shape[axis] * H // (heads[1] - heads[0])
            self.arrays[name] = kernels(self.call.xp).working(tuple(shape), y.dtype)
        write(self.call.xp, self.cut(name, self.arrays[name], heads), y)

    def put_state(self, heads: Heads, state: Any) -> None:
        """Copy the parts of a state to their places."""
        for n, y in self._parts_of(state):
            self.put(f"state.{n}", heads, y)

    def _parts_of(self, state: Any) -> list[tuple[str, Array]]:
        """The arrays of a state by name; none without one."""
        each = [] if state is None else flatten("", state).values()
        return list(zip(self.parts, each, strict=False))

    def add(self, name: str, y: Array | None) -> None:
        """Add the gradient of a shared array."""
        if y is not None and getattr(self.call, name) is not None:
            self.arrays[name] = added(self.call.xp, self.arrays[name], y) if name in self.arrays else y

    def get(self, name: str) -> Any:
        """An array, or the state, as the caller has them; None without one."""
        give_back, x = self.call.library.give_back, None
        if name == "state":
            each = [self.arrays.get(f"state.{n}") for n in self.parts]
            kind: Any = self.call.spec.state.type_of(self.call.options)
            return None if each[0] is None else (kind or (lambda S: S))(*map(give_back, each))
        if name in self.arrays:
            x = self.arrays[name]
            like = getattr(self.call, name, None)
            x = x if like is None else gradient_like(self.call.xp, x, like)
        return None if x is None else give_back(x)


def _axis(axes: list[str], sizes: Any) -> int | None:
    """The axis of heads, from the last one on; None where there is none, or one for all."""
    n, letter = next(((n, a) for n, a in enumerate(axes) if a in ("H", "Hk", "Hq")), (0, ""))
    return None if not letter or (sizes.get(letter, 1) == 1 and sizes["H"] > 1) else n - len(axes)
