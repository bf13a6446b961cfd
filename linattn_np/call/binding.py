"""The arguments of a public function: bound, checked, in the layout and dtype of the computation."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..runtime import shapes
from ..runtime.arrays import compute_dtype, dtype_name, enter, is_cupy, is_numpy
from ..runtime.callers import caller
from ..runtime.pools import StateRows, check_rows, take_rows
from ..runtime.recorder import Recorder, active, refuse
from ..runtime.shapes import flatten, sequences, unflatten
from ..runtime.values import is_finite, is_real, is_whole, is_word, shown
from ..spec import Call, VariantSpec
from . import layouts
from .options import COMMON
from .overwrite import check_inputs_disjoint, check_overwritten


def inputs_of(call: Call) -> Any:
    """The core's inputs: the result of the change of variables."""
    return call.spec.change.to_core(call)


def is_cut(call: Call) -> bool:
    """Whether a call is computed piece by piece (pieces.py), as far as that is known without its core.

    Without `unpack_at`, a state that depends on tokens too is found by calls that end at the positions.
    """
    at, state = call.options["return_states_at"], call.spec.state
    return has_fewer_queries(call) or (at is not None and state.unpack_vjp is not None and state.unpack_at is None)


def lacks_states(call: Call, core: Any, x: Any) -> bool:
    """Whether states at positions are asked for that the core does not return: the call is computed in pieces."""
    if call.options["return_states_at"] is None:
        return False
    return not core.gives_states(call.name, x, call.plan, call.options["backend"])


def has_fewer_queries(call: Call) -> bool:
    """Whether causal queries are those of the last tokens only."""
    T = call.sizes["T"]
    return call.plan.causal and call.sizes.get("Tq", T) < T


def is_doubtful(call: Call) -> bool:
    """Whether the shapes suggest heads first although the layout is time first."""
    is_first = call.options["layout"] == "time_first" and call.given_state is None
    return is_first and call.sizes.get("H", 0) >= 8 * call.sizes["T"] > 8


def is_recordable(call: Call) -> bool:
    """Whether a call with this signature may be replayed: it neither warns nor looks at numbers."""
    looks = call.options["check"] or is_doubtful(call) or gathers_rows(call)
    counts = (call.state_parts.get(name) for name in call.spec.counts)
    return not looks and all(S is None or "int" in dtype_name(S) for S in counts)


def gathers_rows(call: Call) -> bool:
    """Whether the core gets states that are gathered from a pool, or of which some were set to zero."""
    return call.rows is not None and call.plan.pool_rows is None


def spec_of(caller: str, fn: Any) -> VariantSpec:
    """The spec of a public function.   Raises TypeError for anything else."""
    spec = getattr(fn, "spec", None)
    if spec is None:
        raise TypeError(f"{caller}: fn is {shown(getattr(fn, '__name__', fn))}, expected a variant of linattn_np")
    return spec


def prepare(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Call:
    """Check a call. Every error about bad input is raised here or by the change of variables."""
    fn = spec.name
    given, options = bind(spec, arrays, keywords)
    own = normalise(spec, "state", options["state"], options)
    if own is not None and spec.state.parts is not None:
        _check_kind(spec, own, options)
    (library, entered), recorder = enter(fn, {**given, **(each := flatten("state", own))}), None
    if is_numpy(library.xp):
        recorder = Recorder() if active.recorder is None else None  # of a layer, the call is a part of whose plan
    elif is_cupy(library.xp):
        from ..ops.cuda.moves import namespace

        library, recorder = library._replace(xp=namespace(library.xp)), Recorder()
    xp = library.xp
    state = unflatten(own, [entered.pop(n) for n in each])
    axes, query = axes_of(spec, options), spec.change.query
    if options["cu_seqlens"] is None and query is not None and _has_fewer_queries(spec, options, entered, axes):
        axes[query] = axes[query].replace("T ", "Tq ", 1)
        two = [name for name, x in entered.items() if x is not None and shapes.is_of_pairs(axes[name])]
        if two or (spec.grows and options["return_states_at"] is not None):
            raise ValueError(f"{fn}: {[*two, 'return_states_at'][0]} with fewer queries than tokens, expected as many")
    layout = None if options["layout"] == "time_first" else layouts.LAYOUTS[options["layout"]]
    theirs = axes if layout is None else {n: layout.axes(a) for n, a in axes.items()}
    sizes = shapes.check_arrays(fn, entered, theirs, spec.change.value, spec.complex_arrays)
    if not spec.shares_states and sizes.get("Hq", 0) > sizes["H"]:
        query, value = spec.change.query, spec.change.value
        raise ValueError(
            f"{fn}: {query} has Hq = {sizes['Hq']} heads and {value} H = {sizes['H']}, expected Hq to divide H"
        )
    sizes.setdefault("K", 1)  # a variant without queries and keys
    if layout is not None:
        layout.add_sizes(sizes)
        entered = {n: layout.enter(xp, x, axes[n], sizes["..."]) for n, x in entered.items()}
    offsets = options["cu_seqlens"] = shapes.check_offsets(fn, options["cu_seqlens"], sizes)
    if options["return_states_at"] is not None:
        options["return_states_at"] = shapes.check_positions(fn, options["return_states_at"], sizes["T"])
        if offsets is not None and not options.get("causal", True):
            raise ValueError(f"{fn}: return_states_at with cu_seqlens and causal=False, expected causal=True")
    numbers = (S for name, S in flatten("state", state).items() if name not in spec.counts)
    dtype = compute_dtype(xp, *entered.values(), *numbers)
    plan = _plan(spec, xp, dtype, options, sizes, offsets)
    rows = _rows_of(spec, xp, options, sizes, state)
    call = Call(
        **entered,
        spec=spec,
        library=library,
        options=options,
        axes=axes,
        sizes=sizes,
        batch=sizes["..."],
        plan=plan,
        given_state=state,
        state=state,
        rows=rows,
        recorder=recorder,
    )
    with recorder if recorder is not None and is_numpy(xp) else contextlib.nullcontext():
        _enter_state(call)
    if active.recorder is not None and not is_recordable(call):
        refuse("a call warns, or looks at numbers")
    if is_doubtful(call):
        warnings.warn(
            f"{fn}: {sizes['T']} tokens of {sizes['H']} heads in the layout (..., T, H, K): if the arrays are "
            "(..., H, T, K), pass layout='heads_first'",
            UserWarning,
            stacklevel=caller()[1],
        )
    if options["overwrite_state"]:
        parts, begins = flatten("state", state), flatten("state", call.initial) if spec.counts else {}
        check_overwritten(fn, parts, call.plan, flatten("state", own), {n: begins[n] for n in spec.counts})
        check_inputs_disjoint(fn, parts, entered)
    if options["check"]:
        from .findings import enforce

        enforce(call)
    return call


def _plan(
    spec: VariantSpec, xp: Any, dtype: Any, options: dict[str, Any], sizes: shapes.Sizes, offsets: list[int] | None
) -> Any:
    scale = options["scale"]
    if scale is None:
        scale = max(sizes["K"], 1) ** -0.5 if spec.scaled else 1.0
    fields = {  # of core.py:CallPlan
        "xp": xp,
        "dtype": dtype,
        "scale": scale,
        "causal": options.get("causal", True),
        "chunk_size": options["chunk_size"],
        "sequences": tuple(sequences(sizes["T"], offsets)),
        "overwrite": options["overwrite_state"],
        "precision": options["precision"],
        "has_state": options["state"] is not None,
        "returns_state": options["return_state"] or options["overwrite_state"],
        "states_at": None if options["return_states_at"] is None else tuple(options["return_states_at"]),
    }
    return spec.core.plan(fields, spec, options, sizes)


# arrays and options by name


def bind(
    spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays by name, options with defaults)."""
    fn, names = spec.name, list(spec.arrays)
    if len(arrays) > len(names):
        raise TypeError(
            f"{fn}: {len(arrays)} arrays were given by position, expected at most {len(names)}: "
            f"{', '.join(names)}; options go by keyword"
        )
    bound = dict(zip(names, arrays, strict=False))
    options = {**spec.options, **COMMON}
    for name, value in keywords.items():
        if name in spec.arrays:
            if name in bound:
                raise TypeError(f"{fn}: {name} was given twice, by position and by keyword")
            bound[name] = value
        elif name in options:
            options[name] = _boolean(name, fn, value) if isinstance(options[name], bool) else value
        else:
            from ..runtime.hints import did_you_mean

            hint = did_you_mean(name, [*names, *options])
            raise TypeError(f"{fn}: unknown option {name!r}{hint}, expected one of {', '.join(options)}")
    for name, (option, default) in spec.rules.items():
        named = isinstance(bound.get(name), str)
        options[option] = bound[name] if named else default
        bound[name] = None if named else bound.get(name)
    for name, arg in spec.arrays.items():
        if bound.setdefault(name, None) is None and not arg.optional and name != spec.change.query:
            required = ", ".join(n for n, a in spec.arrays.items() if not a.optional)
            raise TypeError(f"{fn}: {name} is missing, expected the arrays {required}")
    for name, check in CHECKS.items():
        if name in keywords and name in options:
            options[name] = check(fn, keywords[name])
    if options["backend"] is not None and not is_word(options["backend"], spec.core.BACKENDS):
        from ..runtime.hints import backend

        word = f"{shown(options['backend'])}{backend(options['backend'])}"
        raise ValueError(f"{fn}: backend is {word}, expected None or one of {', '.join(map(repr, spec.core.BACKENDS))}")
    if options["layout"] == "heads_first" and not shapes.head_axis(spec.arrays[spec.change.value].axes):
        options["layout"] = "time_first"  # there are no heads
    if options["overwrite_state"] and options["state"] is None:
        raise ValueError(f"{fn}: overwrite_state=True without a state, expected state to be given")
    if spec.check_options is not None:
        spec.check_options(fn, options)
    return bound, options


def axes_of(spec: VariantSpec, options: Mapping[str, Any]) -> dict[str, str]:
    """Axes of the arrays of a call; queries that are not causal may have their own length Tq."""
    entered = (lambda axes: axes) if options.get("state") is None else shapes.with_state
    axes, query = {name: entered(given.axes) for name, given in spec.arrays.items()}, spec.change.query
    if query is not None and options.get("causal") is False and options.get("cu_seqlens") is None:
        for name in (query, *filter(lambda name: shapes.is_of_pairs(axes[name]), axes)):
            axes[name] = axes[name].replace("T ", "Tq ", 1)
    return axes


def _has_fewer_queries(
    spec: VariantSpec, options: Mapping[str, Any], given: Mapping[str, Any], axes: Mapping[str, str]
) -> bool:
    """Whether causal queries are those of the last tokens only; not if tokens and heads seem to be exchanged."""
    found = []
    for name in (str(spec.change.query), spec.change.value):
        x, own = given[name], axes[name]
        if options["layout"] != "time_first":
            own = layouts.LAYOUTS[options["layout"]].axes(own)
        letters = own.split("|")[0].split()
        if x is None or "T" not in letters or x.ndim < len(letters):
            return False
        shape = x.shape[x.ndim - len(letters) :]
        found.append((shape[letters.index("T")], next(n for n, a in zip(shape, letters, strict=True) if a[0] == "H")))
    (Tq, Hq), (T, H) = found
    return bool(Tq < T and (Tq, Hq) != (H, T))


# checks of options, each (fn, value) -> value


def _chunk_size(fn: str, given: Any) -> int | str | None:
    if not (given is None or is_word(given, ("parallel",)) or is_whole(given)):
        raise ValueError(f"{fn}: chunk_size is {shown(given)}, expected None, 'parallel' or a whole number from 1")
    return given if given is None or isinstance(given, str) else int(given)


def _precision(fn: str, given: Any) -> str | None:
    if given is not None and not is_word(given, ("tf32",)):
        raise ValueError(f"{fn}: precision is {shown(given)}, expected None or 'tf32'")
    return given


def _chunk_states(fn: str, given: Any) -> str | None:
    if given is not None and not is_word(given, ("loop", "scan")):
        raise ValueError(f"{fn}: chunk_states is {shown(given)}, expected None, 'loop' or 'scan'")
    return given


def _layout(fn: str, given: Any) -> str:
    if not is_word(given, ("time_first", *layouts.LAYOUTS)):
        raise ValueError(f"{fn}: layout is {shown(given)}, expected 'time_first' or 'heads_first'")
    return given


def scale_of(fn: str, given: Any) -> float | None:
    """The option scale."""
    if given is not None and not is_real(given):
        raise TypeError(f"{fn}: scale is {shown(given)}, expected None or a real number")
    if given is not None and not is_finite(given):
        raise ValueError(f"{fn}: scale is {shown(given)}, expected None or a finite number")
    return None if given is None else float(given)


def threads_of(fn: str, given: Any) -> int:
    """The option num_threads."""
    if not is_whole(given):
        raise ValueError(f"{fn}: num_threads is {shown(given)}, expected None or a whole number from 1")
    return int(given)


def _l2norm_eps(fn: str, given: Any) -> float:
    if not is_real(given) or not is_finite(given) or given < 0:
        raise ValueError(f"{fn}: l2norm_eps is {shown(given)}, expected a finite number from 0")
    return float(given)


def _lower_bound(fn: str, given: Any, of: str = "lower_bound") -> float | None:
    if given is not None and (not is_real(given) or not is_finite(given) or given >= 0):
        raise ValueError(f"{fn}: {of} is {shown(given)}, expected None or a finite number below 0")
    return None if given is None else float(given)


def _boolean(name: str, fn: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise TypeError(f"{fn}: {name} is {shown(given)}, expected True or False")
    return given


CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "chunk_size": _chunk_size, "chunk_states": _chunk_states, "precision": _precision, "layout": _layout,
    "scale": scale_of, "l2norm_eps": _l2norm_eps, "lower_bound": _lower_bound,
    "gate_lower_bound": functools.partial(_lower_bound, of="gate_lower_bound"),
}  # fmt: skip


# states: one array in most variants, a named tuple of arrays in some


def normalise(spec: VariantSpec, name: str, state: Any, options: Mapping[str, Any]) -> Any:
    """A state in the variant's form: one array, or its named tuple from any tuple of that length."""
    if not isinstance(state, tuple):
        return state
    kind = spec.state.type_of(options)
    if kind is None:
        shape = shapes.state_shape(axes_of_states(spec)["state"])
        raise TypeError(f"{spec.name}: {name} is a {type(state).__qualname__}, expected one array {shape}")
    if len(state) != len(kind._fields) or any(S is None for S in state):
        count = {2: "two", 3: "three"}.get(len(kind._fields), len(kind._fields))
        raise TypeError(
            f"{spec.name}: {name} is a {type(state).__qualname__} of {len(state)}, "
            f"expected {count} arrays ({', '.join(kind._fields)}) as a {kind.__name__}"
        )
    return kind(*state)


def _check_kind(spec: VariantSpec, state: Any, options: Mapping[str, Any]) -> None:
    """Raise TypeError for one array where the state has several."""
    if (kind := spec.state.type_of(options)) is not None and not isinstance(state, kind):
        when = "" if spec.state.option is None else f" with {spec.state.option}=True"
        raise TypeError(
            f"{spec.name}: state is a {type(state).__qualname__}, expected ({', '.join(kind._fields)}) as "
            f"a {kind.__name__}{when}"
        )


def axes_of_states(spec: VariantSpec) -> Mapping[str, str]:
    """Axes of the parts of a state; "state" is a state of one array."""
    return spec.state.axes or spec.core.STATE_AXES


def _enter_state(c: Call) -> None:
    """Set the core's initial state; rows of a pool are gathered here if variant or core do not read it by its rows."""
    spec, plan, state, rows = c.spec, c.plan, c.given_state, c.rows
    is_pool = rows is not None and rows.at is not None
    plain = is_pool and spec.state.plain is not None and spec.state.plain(c.options)
    if spec.state.pack is None or plain:
        begin = initial_state(spec, plan.xp, c.sizes, state, None if is_pool and spec.core.TAKES_POOLS else rows)
        for name, S in ({} if state is None else flatten("state", state)).items():
            axes, counts = axes_of_states(spec)[name.removeprefix("state.")], name in spec.counts
            S = flatten("state", begin)[name] if counts else S  # other rows of a pool may hold anything
            shapes.check_state(c.name, S, c.sizes, axes, name, is_pool and not counts, counts, spec.state.is_complex)
        c.initial = begin
        if is_pool and spec.core.TAKES_POOLS:
            c.plan = plan._replace(pool_rows=rows)
        return
    c.state = initial_state(spec, plan.xp, c.sizes, state, rows)
    c.initial = spec.state.pack(c, c.state)


def _rows_of(spec: VariantSpec, xp: Any, options: dict[str, Any], sizes: shapes.Sizes, state: Any) -> Any:
    """The checked StateRows of a call; None if every sequence begins with the state given for it."""
    fn, by_part, given, fresh = spec.name, axes_of_states(spec), options["state_rows"], options["fresh"]
    if given is None and fresh is None:
        return None
    if state is None:
        kind = spec.state.type_of(options)
        pool = shapes.state_shape(by_part["state" if kind is None else kind._fields[0]], "P")
        name, wanted = ("fresh", "given") if given is None else ("state_rows", f"the pool {pool}")
        raise ValueError(f"{fn}: {name} without a state, expected state to be {wanted}")
    each = {n: (S, by_part[n.removeprefix("state.")]) for n, S in flatten("state", state).items()}
    rows = check_rows(fn, xp, (given, fresh), sizes, each)
    return None if given is None and rows.is_plain else rows


def initial_state(spec: VariantSpec, xp: Any, sizes: shapes.Sizes, state: Any, rows: StateRows | None) -> Any:
    """The states that the sequences of a call begin with; None without one."""
    if rows is None:
        return state
    batch, unit = shapes.lead(sizes), spec.state.unit
    each = flatten("state", state).items()
    return unflatten(state, [take_rows(xp, S, rows, batch, name.removeprefix("state.") in unit) for name, S in each])
