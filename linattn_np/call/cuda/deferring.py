"""One token on CuPy arrays: the change of variables is computed by one kernel before the core's and one after.

An array call takes 15 us of the host, a kernel 4. The arrays of the call become deferred ones
(runtime/cuda/deferred.py), and the core's kernels get what they read computed by one launch, and so do the results. A
repeated call is these launches.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from ...core import COMPUTATIONS
from ...runtime.cuda import launch
from ...runtime.cuda.deferred import Deferred, Unsupported, given
from ...runtime.cuda.deferred_namespace import Namespace
from ...runtime.cuda.fusion import materialise
from ...runtime.cuda.head_calls import arrays_read
from ...runtime.tracing import FIXED
from ...spec import Variables
from .. import binding
from ..binding import Prepared, flatten, unflatten

Array = Any
Finish = Callable[[Prepared, Any, Any], tuple[Any, Any]]
Pull = Callable[["Forward", list[Any]], Any]


def takes(call: Prepared) -> bool:
    """Whether the array calls of a call of one token are deferred: in float32, by kernels."""
    options, plan = call.options, call.plan
    plain = all(options.get(n) is None for n in ("state_rows", "fresh", "return_states_at", "cu_seqlens"))
    usual = options["backend"] in (None, "cuda") and options["chunk_size"] in (None, 1) and plan.causal
    usual = usual and call.spec.core.DEFERS
    return plain and usual and not options["check"] and plan.dtype == plan.xp.float32 and launch.unusable() is None


def on_deferred(call: Prepared) -> Prepared:
    """The call on deferred arrays.   Raises Unsupported if they cannot be described."""
    c, spec = call.variables, call.spec
    v = getattr(c, spec.change.value)
    xp = Namespace(call.plan.xp, v.device)
    xp.heads = prod(v.shape[:-3]), v.shape[-2]
    fixed = {n: x for n, x in vars(c).items() if n in FIXED}
    arrays = {n: None if (x := getattr(c, n)) is None else given(xp, x) for n in c.axes}
    own = Variables(**fixed | arrays | {"xp": xp})
    state = call.given_state
    if state is not None:
        state = unflatten(state, [given(xp, S) for S in flatten("state", state).values()])
    core_state = state
    if spec.state.pack is not None:
        own.state = state
        core_state = spec.state.pack(own, state)
    library = call.library._replace(xp=xp, device=xp.device, give_back=lambda x: x, name="linattn_np")
    return call._replace(library=library, variables=own, plan=call.plan._replace(xp=xp), state=core_state,
                         given_state=state)  # fmt: skip


def run(call: Prepared, finish: Finish) -> tuple[Any, Any] | None:
    """The public (out, state) of a call; None if it cannot be deferred, with nothing changed."""
    parts = [S for S in flatten("state", call.given_state).values() if S is not None]
    saved = [call.plan.xp.asarray(S, copy=True) for S in parts] if call.options["overwrite_state"] else []
    found = forward(call, finish)
    if found is None:
        for S, before in zip(parts, saved, strict=False):
            S[...] = before
        return None
    return found.result


class Forward(NamedTuple):
    """A call on deferred arrays, its core, what that returned, and the public (out, state)."""

    call: Prepared
    core: Any
    computed: Any
    result: tuple[Any, Any]


def forward(call: Prepared, finish: Finish) -> Forward | None:
    """A call whose array calls are deferred; None if they cannot be.

    finish: (call, core's output, final state) -> (out, state).
    """
    if not takes(call):
        return None
    try:
        with call.recorder:
            own = on_deferred(call)
            x = own.inputs()
            core = COMPUTATIONS[type(x)]
            made = core.forward(call.spec.name, x, own.plan, own.state, own.options["backend"])
            result = computed(own.plan.xp, finish(own, *made[:2]), call.library.give_back)
        return Forward(own, core, made, result)
    except Unsupported:
        call.recorder.launches.clear()
        call.recorder.allocated.clear()
        return None


def pullback(of: Forward, call: Prepared, cotangents: tuple[Any, Any], pull: Pull) -> Any:
    """The gradients of a call with (dout, dstate) in memory; None if they cannot be deferred.

    call: as it was prepared. pull: (forward, cotangents) -> gradients.
    """
    xp = of.call.plan.xp
    xp.held.clear()
    try:
        dout, dstate = cotangents
        dstate = binding.normalise(call.spec, "dstate", dstate, call.options)
        each = flatten("dstate", dstate)
        _, entered = binding.enter(call.spec.name, {"dout": dout, **each}, call.library)
        known = {n: None if x is None else given(xp, x) for n, x in entered.items()}
        dstate = None if dstate is None else unflatten(dstate, [known[n] for n in each])
        return computed(xp, pull(of, [known["dout"], dstate]), call.library.give_back)
    except Unsupported:
        return None
    finally:
        Deferred.release(xp.held)  # another pullback has other arrays


def computed(xp: Namespace, results: Any, give_back: Any) -> Any:
    """Results in memory, with the assignments made; nested tuples stay as they are."""
    results = _replaced(results, lambda x: xp.copy(x) if isinstance(x, Deferred) and _is_part(x) else x)
    wanted = [x for x in _leaves(results) if isinstance(x, Deferred)]
    into: list[Array | None] = [None] * len(wanted)
    for array, value in xp.assigned:
        wanted.append(value)
        into.append(array)
    if any(y is z for y in arrays_read([x for x in wanted if x.real is None]) for z in xp.overwritten):
        raise Unsupported("a state is read after it has been overwritten")
    for one in xp.pending:  # whose output nobody wants
        wanted.append(Deferred(xp, one.end))
        into.append(None)
    found = dict(zip(map(id, wanted), materialise(wanted, into), strict=True))
    xp.assigned.clear()
    return _replaced(results, lambda x: give_back(found[id(x)]) if isinstance(x, Deferred) else x)


def _is_part(x: Deferred) -> bool:
    """Whether x is a part of an array that this call has allocated: replays return whole arrays."""
    if x.real is None or x.node.kind != "array" or x.real is x.node.value:
        return False
    dense = x.real.flags.c_contiguous or (x.ndim > 2 and x.real.swapaxes(-3, -2).flags.c_contiguous)
    return not dense or x.size < prod(x.node.shape)


def _leaves(x: Any) -> list[Any]:
    return [y for part in x for y in _leaves(part)] if isinstance(x, tuple) else [x]


def _replaced(x: Any, how: Any) -> Any:
    """A nested tuple with every leaf replaced."""
    if not isinstance(x, tuple):
        return how(x)
    parts = [_replaced(part, how) for part in x]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
