"""From the arguments of a public function to the core and back: bind, check, change variables, compute."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from . import again, alike, pulled
from .card import Card, Variables
from .cores import matrix_state
from .cores.kinds import PARTS
from .cores.matrix_state import mapped, slots, solved
from .cores.matrix_state.inputs import Plan
from .cuda import launch
from .ground import backend as backends
from .ground import shapes, threads
from .ground.chunk_table import sequences
from .ground.namespace import Array, Library, cast, compute_dtype, enter, is_mutable
from .ground.rows import check_rows, put_rows, take_rows
from .ground.unchanged import check_unchanged, mark
from .ground.values import is_whole, is_word, shown
from .options import COMMON, scale_of, threads_of
from .results import Result, copied, gradients_of
from .state_parts import by_name, check_inputs_apart, check_overwritten, pair, parts, whole

ROOMS = {solved.SolvedInputs: solved, slots.SlotInputs: slots, mapped.MappedInputs: mapped}
NO_LIMIT = contextlib.nullcontext()
F = TypeVar("F", bound=Callable[..., Any])


def public(card: Card) -> Callable[[F], F]:
    """Make a documented stub the public function of `card`."""

    def decorate(stub: F) -> F:
        @functools.wraps(stub)
        def function(*arrays: Any, **keywords: Any) -> Any:
            return run(card, arrays, keywords)

        function.card = card  # type: ignore[attr-defined]
        function.vjp = functools.partial(run_vjp, card)  # type: ignore[attr-defined]
        function.__signature__ = _signature(card)  # type: ignore[attr-defined]
        return function  # type: ignore[return-value]

    return decorate


def _signature(card: Card) -> inspect.Signature:
    one, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, one, default=None if given.optional else inspect.Parameter.empty)
                  for name, given in card.arrays.items()]
    options = {**card.options, **COMMON}
    return inspect.Signature(parameters + [inspect.Parameter(n, keyword, default=v) for n, v in options.items()])


def room(inputs: Any) -> Any:
    """What computes a call in the core's variables: a module with choose, forward and backward."""
    return ROOMS.get(type(inputs), matrix_state)


class Prepared(NamedTuple):
    """A call, checked and changed into the core's variables."""

    card: Card
    library: Library
    options: dict[str, Any]
    variables: Variables
    inputs: Any  # of its room: Inputs in most
    plan: Plan
    state: Array | None  # the core's
    given_state: Any  # the caller's
    rows: Array | None  # of given_state, a pool
    launches: list[Any]  # of the change of variables, on a GPU


def run(card: Card, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """What the public function returns: out, or (out, state)."""
    how, made = again.look(card.name, arrays, keywords)
    if how is not None and made is not None:
        out, state = how(made[1], keywords)
        return out if state is None else Result(out, state)
    like = alike.likeness(card, arrays, keywords)
    if like is not None and (repeated := _repeat(card, like, keywords)) is not None:
        return Result(*repeated) if repeated[0] is None or keywords.get("return_state") else repeated[0]
    with _limit(card, keywords):
        call = prepare(card, arrays, keywords)
        options, x = call.options, call.inputs
        core_out, end, kept = room(x).forward(card.name, x, call.plan, call.state, options["backend"])
        with launch.written() as finishing:
            result = _result(call, core_out, end)
        kept = again.between(call.launches, kept, finishing)
        mine = end is call.given_state
        if options["overwrite_state"] == mine and kept.q is None and not _is_doubtful(call):
            out, state = result if isinstance(result, Result) else (result, None)
            again.keep(made, [*arrays, *keywords.values()], kept.saved.starts, end, out, state, mine)
        if like is not None and not _is_doubtful(call):
            alike.remember(like, card, call.variables, x, call.plan, kept)
        return result


def _repeat(card: Card, like: alike.Likeness, keywords: Mapping[str, Any]) -> tuple[Any, Any] | None:
    if keywords.get("num_threads") is None:
        return alike.repeat(like)
    with _limit(card, keywords):
        return alike.repeat(like)


def _limit(card: Card, keywords: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """The number of threads that was asked for."""
    count = keywords.get("num_threads")
    return NO_LIMIT if count is None else threads.limited(threads_of(card.name, count))


def run_vjp(card: Card, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """(what the public function returns, pullback)."""
    forward, made = pulled.look(card.name, arrays, keywords)
    if made is None or forward is None:
        with _limit(card, keywords):  # checked before anything else, as in `run`
            call = prepare(card, arrays, keywords)
        return _vjp_in_full(call, arrays, keywords)
    (out, state), held = pulled.make(forward, made, [*arrays, *keywords.values()])

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        found = pulled.pull(held, (dout, dstate))  # other cotangents than before: forward and all once more
        if found is None:
            found = _vjp_in_full(prepare(card, arrays, keywords), arrays, keywords)[1](dout, dstate)
        return found

    return Result(out, state) if out is None or keywords.get("return_state") else out, pullback


def _vjp_in_full(
    call: Prepared, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, Callable[..., Any]]:
    card = call.card
    if call.options["overwrite_state"]:
        raise ValueError(f"{card.name}: overwrite_state=True was given to vjp, expected False: "
                         "the pullback needs the state that would be overwritten")
    if call.options["state_rows"] is not None:
        raise ValueError(f"{card.name}: state_rows was given to vjp, expected None: "
                         "take the rows of the pool yourself, as in state=pool[rows]")
    made_up = card.gate is not None and getattr(call.variables, card.gate) is None
    x = call.inputs
    plan = call.plan._replace(gradients=True, gate_gradient=not made_up, watched=room(x) is matrix_state)
    with _limit(card, keywords):
        core_out, end, kept = room(x).forward(card.name, x, plan, call.state, call.options["backend"])
    with launch.written() as finishing:
        result = _result(call, core_out, end)
    kept = again.between(call.launches, kept, finishing)
    shape = None if core_out is None else _out_shape(call, core_out)
    core_out = core_out if card.from_core else None
    pair_of = result if isinstance(result, Result) else (result, None)
    held = None if _is_doubtful(call) else pulled.keep(card.name, arrays, keywords, kept, core_out, end, *pair_of)
    kept, marks = pulled.unwatched(kept), mark(by_name(card, arrays, keywords))
    if is_mutable(call.plan.xp):
        result = _apart(call, kept, result)

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        if (found := pulled.pull(held, (dout, dstate))) is not None:
            return found
        check_unchanged(card.name, marks)
        d_out, d_state, grads = _cotangents(call, dout, dstate, shape, end)
        with _limit(card, keywords), pulled.watching(held, kept) as (watched, seen):
            c = call.variables
            if card.from_core_vjp and d_out is not None:
                d_out, more = card.from_core_vjp(c, core_out, d_out)
                c = c.knowing({n: more.pop(n) for n in [*more] if n not in card.arrays})
                _add(grads, more)
            d, dstate0 = room(x).backward(watched, d_out, d_state)
            _add(grads, card.to_core_vjp(c, d))
        found = _gradients(call, grads, dstate0)
        pulled.keep_pull(held, (dout, dstate), seen, found)
        return found

    return result, pullback


def _apart(call: Prepared, kept: Any, result: Any) -> Any:
    """The result in memory of its own where the pullback reads it again: the caller may write to what it gets."""
    own = functools.partial(copied, call.library)
    out, state = result if isinstance(result, Result) else (result, None)
    if room(call.inputs) is mapped and call.inputs.eps is not None:  # divides by the sums again
        out = own(out)
    read_again = call.card.unpack_state_vjp is not None or kept.q is not None
    if state is not None and read_again:
        state = whole(state, [own(S) for S in parts("state", state).values()])
    return Result(out, state) if isinstance(result, Result) else out


def _add(grads: dict[str, Array], more: Mapping[str, Array]) -> None:
    """grads += more, by name."""
    for name, y in more.items():
        grads[name] = y if name not in grads else grads[name] + y


def _out_shape(call: Prepared, core_out: Array) -> tuple[int, ...]:
    """Shape of out as the caller gets it."""
    *batch, T, H = core_out.shape[:-1]
    V = call.variables.sizes.V
    return (*batch, H, T, V) if call.options["layout"] == "heads_first" else (*batch, T, H, V)


def prepare(card: Card, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Prepared:
    """Check a call and change its variables. All errors of bad input are raised here."""
    fn = card.name
    given, options = _bind(card, arrays, keywords)
    state = pair(card, "state", options["state"], options)
    each = parts("state", state)
    library, entered = enter(fn, {**given, **each})
    xp = library.xp
    own, state = state, whole(state, [entered.pop(n) for n in each])
    specs = card.specs(options)
    turned = options["layout"] == "heads_first"
    theirs = {n: shapes.heads_first(spec) for n, spec in specs.items()} if turned else specs
    sizes = shapes.check_arrays(fn, entered, theirs, card.value)
    if turned:
        entered = {n: _turn(xp, x, specs[n], back=True) for n, x in entered.items()}
    offsets = shapes.check_offsets(fn, options["cu_seqlens"], sizes)
    steps = sizes.n if card.micro_steps else 1
    _check_layout(fn, options, sizes, state)
    dtype = compute_dtype(xp, *entered.values(), *parts("state", state).values())
    starts = None if offsets is None else [steps * n for n in offsets]
    plan = Plan(
        xp, dtype, _scale(card, options, sizes), card.query_row, card.erase_row,
        options.get("causal", True), options["chunk_size"], tuple(sequences(steps * sizes.T, starts)),
        overwrite=options["overwrite_state"], precision=options["precision"], unit=options.get("qk_l2norm", False),
        steps=steps,
    )
    if options["state_rows"] is not None:
        plan = plan._replace(rows=_check_pool(fn, xp, options, sizes, state))
    c = Variables(**entered, xp=xp, dtype=dtype, sizes=sizes, options=options, name=fn, sequences=plan.sequences)
    if card.pack_state is not None and not (plan.rows is not None and card.plain is not None and card.plain(options)):
        c.state = state if plan.rows is None else _rows_of(plan, sizes, state)
        core_state = card.pack_state(c, c.state)
        rows, plan = plan.rows, plan._replace(rows=None)
    else:
        if state is not None:
            shapes.check_state(fn, state, sizes, pool=plan.rows is not None)
        core_state, rows = state, plan.rows
    if options["overwrite_state"]:
        check_overwritten(fn, state, plan, own)
        check_inputs_apart(fn, state, entered)
    with launch.written() as launches:
        inputs = card.to_core(c)
    return Prepared(card, library, options, c, inputs, plan, core_state, state, rows, launches)


def _bind(card: Card, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays by name, options with defaults)."""
    fn, names = card.name, list(card.arrays)
    if len(arrays) > len(names):
        raise TypeError(f"{fn}: {len(arrays)} arrays were given by position, expected at most {len(names)}: "
                        f"{', '.join(names)}; options go by keyword")
    bound = dict(zip(names, arrays, strict=False))
    options = {**card.options, **COMMON}
    for name, value in keywords.items():
        if name in card.arrays:
            if name in bound:
                raise TypeError(f"{fn}: {name} was given twice, by position and by keyword")
            bound[name] = value
        elif name in options:
            options[name] = value
        else:
            raise TypeError(f"{fn}: unknown option {name!r}, expected one of {', '.join(options)}")
    for name, (option, default) in card.named.items():
        named = isinstance(bound.get(name), str)
        options[option] = bound[name] if named else default
        bound[name] = None if named else bound.get(name)
    for name, given in card.arrays.items():
        if bound.setdefault(name, None) is None and not given.optional and name != card.query:
            raise TypeError(f"{fn}: {name} is missing, expected the arrays {', '.join(names)}")
    _check_options(card, options)
    return bound, options


def _check_options(card: Card, options: dict[str, Any]) -> None:
    fn, C, precision, layout = card.name, options["chunk_size"], options["precision"], options["layout"]
    if not (C is None or is_word(C, ("parallel",)) or is_whole(C)):
        raise ValueError(f"{fn}: chunk_size is {shown(C)}, expected None, 'parallel' or a whole number from 1")
    if is_whole(C):
        options["chunk_size"] = int(C)
    if precision is not None and not is_word(precision, ("tf32",)):
        raise ValueError(f"{fn}: precision is {shown(precision)}, expected None or 'tf32'")
    if not is_word(layout, ("time_first", "heads_first")):
        raise ValueError(f"{fn}: layout is {shown(layout)}, expected 'time_first' or 'heads_first'")
    options["scale"] = scale_of(fn, options["scale"])
    backends.check_name(fn, options["backend"])
    for name in ("return_state", "overwrite_state", "causal", "normalize", "dt_softplus", "qk_l2norm"):
        if name in options and not isinstance(options[name], bool):
            raise TypeError(f"{fn}: {name} is {shown(options[name])}, expected True or False")
    if options["overwrite_state"] and options["state"] is None:
        raise ValueError(f"{fn}: overwrite_state=True without a state, expected state to be given")
    if card.check_options is not None:
        card.check_options(fn, options)


def _is_doubtful(call: Prepared) -> bool:
    """Whether the layout looks like the other one."""
    H, T = call.variables.sizes.H, call.variables.sizes.T
    return call.options["layout"] == "time_first" and call.given_state is None and H >= 8 * T > 8


def _check_layout(fn: str, options: dict[str, Any], sizes: shapes.Sizes, state: Any) -> None:
    H, T = sizes.H, sizes.T
    if options["layout"] == "time_first" and state is None and H >= 8 * T > 8:
        warnings.warn(f"{fn}: {T} tokens of {H} heads in the layout (..., T, H, K): if the arrays are (..., H, T, K), "
                      "pass layout='heads_first'", UserWarning, stacklevel=5)


def _check_pool(fn: str, xp: Any, options: dict[str, Any], sizes: shapes.Sizes, state: Any) -> Array:
    """The rows of a pool that the call uses."""
    if state is None:
        raise ValueError(f"{fn}: state_rows without a state, expected state to be the pool (P, H, K, V)")
    each = parts("state", state)
    for name, S in each.items():
        axes = PARTS[name.removeprefix("state.").replace("state", "S")].split()
        if S.ndim != len(axes) + 1:
            wanted = f"({', '.join(['P', *axes])})"
            raise ValueError(f"{fn}: {name} has shape {tuple(S.shape)}, expected a pool {wanted}")
    return check_rows(fn, xp, options["state_rows"], sizes, next(iter(each.values())))


def _rows_of(plan: Plan, sizes: shapes.Sizes, state: Any) -> Any:
    """The states of a call out of a pool."""
    batch = sizes.batch if sizes.ragged is None else (sizes.ragged,)
    return whole(state, [take_rows(plan.xp, S, plan.rows, batch) for S in parts("state", state).values()])


def _scale(card: Card, options: dict[str, Any], sizes: shapes.Sizes) -> float:
    if options["scale"] is not None:
        return options["scale"]
    return max(sizes.K, 1) ** -0.5 if card.scaled else 1.0


def _turn(xp: Any, x: Array | None, spec: str, back: bool = False) -> Array | None:
    """(..., T, H, D) as (..., H, T, D), or back; a view."""
    if x is None or not shapes.has_time(spec):
        return x
    time = x.ndim - len(spec.split("|")[0].split())
    head = time + shapes.head_axis(spec)
    if time < 0:
        return x
    return xp.moveaxis(x, time, head) if back else xp.moveaxis(x, head, time)


def _result(call: Prepared, core_out: Array | None, end: Array) -> Any:
    card, xp, options = call.card, call.plan.xp, call.options
    out = core_out
    if out is not None:
        if card.from_core is not None:
            out = card.from_core(call.variables, out)
        out = cast(xp, out, getattr(call.variables, card.value).dtype)
        if options["layout"] == "heads_first":
            out = xp.moveaxis(out, -3, -2)
        out = call.library.give_back(out)
    if out is not None and not (options["return_state"] or options["overwrite_state"]):
        return out
    state = card.unpack_state(call.variables, end) if card.unpack_state else end
    if isinstance(state, tuple):
        given = (None,) * len(state) if call.given_state is None else call.given_state
        state = type(state)(*(_final(call, S, mine) for S, mine in zip(state, given, strict=True)))
    else:
        state = _final(call, state, call.given_state)
    return Result(out, state) if out is None or options["return_state"] else out


def _final(call: Prepared, S: Array, given: Array | None) -> Any:
    """The final state as the caller gets it: in the caller's own array if that is to be overwritten, else apart."""
    xp = call.plan.xp
    if call.options["overwrite_state"] and given is not None:
        S = cast(xp, S, given.dtype)  # its one rounding, if it is stored in 16 bits
        if is_mutable(xp):
            if S is not given and call.rows is not None:
                put_rows(xp, given, call.rows, S)
            elif S is not given:
                given[...] = S
            S = given
        return call.library.give_back(S)
    if call.variables.sizes.T == 0:
        S = xp.asarray(S, copy=True)
    return call.library.give_back(S)


def _cotangents(
    call: Prepared, dout: Any, dstate: Any, shape: tuple[int, ...] | None, end: Array
) -> tuple[Array | None, Array | None, dict[str, Array]]:
    """dout and dstate as the core takes them, and gradients by name; dout in the dtype it was given in."""
    fn, xp = call.card.name, call.plan.xp
    if dout is None and dstate is None:
        raise TypeError(f"{fn}: the pullback got neither dout nor dstate, expected at least one")
    dstate = pair(call.card, "dstate", dstate, call.options)
    each = parts("dstate", dstate)
    _, entered = enter(fn, {"dout": dout, **each}, call.library)
    d_out = entered.pop("dout")
    if d_out is not None:
        shapes.check_dtype(fn, "dout", d_out)
        if shape is None or tuple(d_out.shape) != shape:
            raise ValueError(f"{fn}: dout has shape {tuple(d_out.shape)}, expected {shape or 'None: there is no out'}")
        if call.options["layout"] == "heads_first":
            d_out = xp.moveaxis(d_out, -3, -2)
    if dstate is None:
        return d_out, None, {}
    card, c = call.card, call.variables
    want: Any = card.unpack_state(c, end) if card.unpack_state else end
    if isinstance(want, tuple) and not isinstance(dstate, tuple):
        names = ", ".join(f"d{n}" for n in parts("", want)).replace("d.", "d")
        raise TypeError(f"{fn}: dstate is a {type(dstate).__qualname__}, expected ({names}) as a {type(want).__name__}")
    for (name, _), S in zip(each.items(), parts("dstate", want).values(), strict=True):
        d = entered[name]
        shapes.check_dtype(fn, name, d)
        if tuple(d.shape) != tuple(S.shape):
            raise ValueError(f"{fn}: {name} has shape {tuple(d.shape)}, expected {tuple(S.shape)}")
        entered[name] = cast(xp, d, call.plan.dtype)
    given = whole(dstate, [entered[name] for name in each])
    if card.unpack_state_vjp is not None:
        return d_out, *card.unpack_state_vjp(c, end, given)
    return d_out, card.pack_state(c, given) if card.pack_state else given, {}


def _gradients(call: Prepared, grads: dict[str, Array], dstate0: Array) -> Any:
    """A named tuple by input name; None for what was not given."""
    card, xp, c = call.card, call.plan.xp, call.variables
    specs = card.specs(call.options)
    values: list[Any] = []
    for name in card.arrays:
        x = getattr(c, name)
        if x is None:
            values.append(None)
            continue
        d = grads[name] if grads.get(name) is not None else xp.zeros_like(x)
        d = cast(xp, d, x.dtype)
        if call.options["layout"] == "heads_first":
            d = _turn(xp, d, specs[name])
        values.append(call.library.give_back(d))
    state = None
    if call.given_state is not None:
        if card.pack_state_vjp is not None:
            state = card.pack_state_vjp(c, dstate0, grads.get("state"))
        else:
            state = card.unpack_state(c, dstate0) if card.unpack_state else dstate0
        given = parts("state", call.given_state).values()
        each = [call.library.give_back(cast(xp, d, S.dtype))
                for d, S in zip(parts("state", state).values(), given, strict=True)]
        state = whole(state, each)
    return gradients_of((*card.arrays, "state"), *values, state)
