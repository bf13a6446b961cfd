"""Rows of `python -m bench changes`: every variant and option that is a change of variables, and its cells.

A row is found from a spec: the core's inputs of a call say which recurrence it is. A variant whose arrays are these
inputs as they come is the same recurrence with ready inputs. A read-out has several memories, each a cell of its own.

The arrays of mesa_net are the inputs of its read-out: it has no change of variables, and is a cell itself. Its rows are
compared with both memories and the systems solved by the array library on formed matrices: exactly, or by as many
products with them as there are steps. Rows named "over linear cells" compare it with its memories alone, which solve
nothing: they say what the solver costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import array_api_compat as compat
import numpy as np

import linattn_np
from linattn_np import catalog
from linattn_np.call.binding import inputs_of, prepare
from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state.types import Inputs
from linattn_np.ops.conjugate_gradients import conjugate_gradients
from linattn_np.sampling import sample, sizes_by_letter

Call = tuple[str, dict[str, Any]]  # a function, and what it is given
WIDEST = 1024  # features of a map: a wider one is drawn for fewer channels
NARROW = 16  # channels of its queries and keys
SWITCHES = ("qk_l2norm", "beta_sigmoid", "dt_softplus")  # options that preprocess an array


class Pair(NamedTuple):
    """A call with a change of variables, and calls of the core's cells on what it becomes.

    is_change: not of mesa_net, whose arrays are the core's inputs.   is_solved: the systems are solved by
    `library_solver` beside the cells, forward once, in a vjp twice.
    """

    name: str
    changed: Call
    ready: tuple[Call, ...]
    is_change: bool = True
    is_solved: bool = False


def variants() -> list[Any]:
    """The variants of the matrix-state core: a cache of keys and values is no cell of it."""
    return [fn for fn in catalog.variants() if fn.spec.core is matrix_state]


def pairs(B: int, H: int, D: int) -> Iterator[Pair]:
    """All rows, for one token."""
    plain = cells(B, H, D)
    for fn in variants():
        for label, options, names in settings(fn.spec, fn.samples):
            given = draw(fn, (B, H, D), names)
            x = inputs(fn, given, options)
            if any(m.k.shape[-1] > WIDEST for m in memories(x)):
                given = draw(fn, (B, H, D), names, NARROW)
                x = inputs(fn, given, options)
            if not set(options) & {*SWITCHES, "feature_map"} and is_ready(fn, given, x):
                continue
            ready = [ready_call(plain, memory, B) for memory in memories(x)]
            if fn.spec.micro_steps:  # the same variant, on arrays that are not raw
                raw = {n for n, arg in fn.spec.arrays.items() if arg.reinterprets}
                if not options and not raw & set(given):
                    continue
                ready = [(fn.spec.name, {n: y for n, y in given.items() if n not in raw})]
            if all(one is not None for one in ready):
                pair = Pair(f"{fn.spec.name} {label}".rstrip(), (fn.spec.name, given | options), tuple(ready))
                if hasattr(x, "solver"):
                    pair = pair._replace(is_change=False)
                    yield pair._replace(is_solved=True)
                    pair = pair._replace(name=f"{pair.name} over linear cells")
                yield pair


def settings(spec: Any, samples: Any) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """(label, options, optional arrays) of a variant's rows."""
    defaults = spec.options
    yield "", {}, ()
    for options in samples.options:
        if options and options.get("causal", True) and not set(options) & set(SWITCHES):
            yield ", ".join(f"{n}={x}" for n, x in options.items()), dict(options), ()
    for name in SWITCHES:
        if name in defaults:
            yield name, {name: True}, ()
    if "allow_neg_eigval" in defaults:
        yield "beta_sigmoid, allow_neg_eigval", {"beta_sigmoid": True, "allow_neg_eigval": True}, ()
    if "feature_map" in defaults:
        yield "elu+1", {"feature_map": "elu+1"}, ()
    if "iterations" in defaults:
        yield "one step", {"solver": "conjugate_gradients", "iterations": 1}, ()
    raw = tuple(n for n, arg in spec.arrays.items() if arg.reinterprets)
    if raw:
        needed = tuple({spec.arrays[n].reinterprets for n in raw})
        yield raw[0], {}, (*raw[:1], *needed)
        yield ", ".join(raw), {}, (*raw, *needed)
        if "qk_l2norm" in defaults:
            yield ", ".join((*raw, "qk_l2norm")), {"qk_l2norm": True}, (*raw, *needed)
        if "lower_bound" in defaults:
            yield ", ".join((*raw, "lower_bound")), {"lower_bound": -5.0}, (*raw, *needed)
    more = tuple(n for n, arg in spec.arrays.items() if arg.optional and not arg.reinterprets)
    if more:
        yield ", ".join(more), {}, more


def draw(fn: Any, sizes: tuple[int, int, int], names: tuple[str, ...], K: int | None = None) -> dict[str, np.ndarray]:
    """Arrays of one token by name; names: of the optional ones."""
    B, H, D = sizes
    rng, letters = np.random.default_rng(0), sizes_by_letter(T=1, H=H, K=K or D, V=D, M=D)
    given = sample(fn, rng, (B,), **{n: letters[n] for n in ("T", "H", "K", "V", "M")})
    for name, arg in fn.spec.arrays.items():
        if arg.optional and name not in names:
            given.pop(name, None)
        elif arg.reinterprets:
            given[name] = rng.uniform(0, 1, [letters[n] for n in arg.axes.split("|")[0].split()])
    return {n: x.astype(np.float32) for n, x in given.items()}


def inputs(fn: Any, given: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The core's inputs of a call."""
    return inputs_of(prepare(fn.spec, (), {**given, **options}))


def memories(x: Any) -> list[Inputs]:
    """The core's inputs of every memory of a call."""
    if isinstance(x, Inputs):
        return [x]
    if hasattr(x, "memories"):
        return x.memories()
    return [x.memory(x.k), x.memory(x.v)]  # of a solved read-out


# cells


class Cell(NamedTuple):
    """A variant whose arrays are the core's inputs: the array of each, its axes, and how many more the input has."""

    name: str
    fields: dict[str, tuple[str, int, int]]


def cells(B: int, H: int, D: int) -> dict[Any, Cell]:
    """A variant for every recurrence."""
    found: dict[Any, Cell] = {}
    for fn in variants():
        for names in ((), tuple(n for n, arg in fn.spec.arrays.items() if arg.optional and not arg.reinterprets)):
            given = draw(fn, (B, H, D), names)
            x = inputs(fn, given, {})
            if is_ready(fn, given, x):
                fields = {
                    field: next((n, y.ndim, z.ndim - y.ndim) for n, y in given.items() if np.shares_memory(y, z))
                    for field, z in x._asdict().items()
                    if z is not None and not (field == "r" and z is x.k)
                }
                if {name for name, *_ in fields.values()} == set(given):
                    found.setdefault(kind(x), Cell(fn.spec.name, fields))
    return found


def is_ready(fn: Any, given: Mapping[str, np.ndarray], x: Any) -> bool:
    """Whether the core's inputs are the arrays as they come."""
    spec = fn.spec
    own = spec.change.from_core is None or (spec.state.plain is not None and spec.state.plain(spec.options))
    return (
        isinstance(x, Inputs)
        and own
        and not spec.micro_steps
        and spec.change.gate is None
        and all(y is None or any(np.shares_memory(y, z) and y.size == z.size for z in given.values()) for y in x)
    )


def kind(x: Inputs) -> Any:
    """The recurrence of inputs."""
    return x.decay, x.erase, x.gv is not None, x.u is not None, x.r is None or x.r is x.k


def ready_call(plain: Mapping[Any, Cell], x: Inputs, B: int) -> Call | None:
    """A call of a cell on these inputs, or on random numbers where they are placeholders; None without a cell.

    Without a cell of its own erase vectors, that which erases by its keys; with a decay of values alone, zeros for g.
    """
    if x.gv is not None and x.g is None:
        x = x._replace(g=np.zeros(x.k.shape))
    if (cell := plain.get(kind(x)) or plain.get((*kind(x)[:-1], True))) is None:
        return None
    rng, given = np.random.default_rng(1), {}
    for field, (name, axes, more) in cell.fields.items():
        y = getattr(x, field)
        if not any(y.strides):
            y = rng.standard_normal(y.shape)
        y = y[..., 0] if more else y
        given[name] = np.array(y if y.ndim == axes else np.broadcast_to(y, (B, *y.shape)), np.float32)
    return cell.name, given


def library_solver(xp: Any, call: Call, state: Any, times: int) -> Callable[[], None]:
    """`times` solutions of the systems of a token of mesa_net by an array library, whose matrices are formed before.

    Conjugate gradients: as many products with the matrices as there are steps, on average of all rows.
    """
    x = inputs(getattr(linattn_np, call[0]), call[1], {})
    keys = x.memory(x.k)
    Z = xp.exp(x.g[..., 0, :, :])[..., None] * state.Z + keys.k[..., 0, :, :, None] * keys.v[..., 0, :, None, :]
    A = xp.ascontiguousarray(Z + x.ridge[..., 0, :, :, None] * xp.eye(Z.shape[-1], dtype=Z.dtype))
    q = xp.ascontiguousarray(x.q[..., 0, :, None, :])
    if x.solver.exact:
        column = xp.ascontiguousarray(xp.swapaxes(q, -1, -2))
        return lambda: [xp.linalg.solve(A, column) for _ in range(times)] and None
    steps, out = times * mean_steps(x.solver, A, q), xp.empty_like(q)
    return lambda: [xp.matmul(q, A, out=out) for _ in range(steps)] and None


def mean_steps(solver: Any, A: Any, q: Any) -> int:
    """Steps of conjugate gradients, on average of the rows."""
    made = []
    for one, row in zip(A.reshape(-1, *A.shape[-2:]), q.reshape(-1, 1, q.shape[-1]), strict=True):

        def times(p: Any, one: Any = one) -> Any:
            made.append(1)
            return p @ one

        conjugate_gradients(compat.array_namespace(A), times, row, solver.iterations, solver.tolerance)
    return round(len(made) / (q.size // q.shape[-1]))
