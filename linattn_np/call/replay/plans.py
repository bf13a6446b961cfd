"""Recorded plans by the signatures of their calls, and how much memory they hold.

Checking and planning a small call takes longer than computing it. A successful call is therefore recorded under its
signature (signatures.py): everything that its checks and its plan depend on, except the numbers in its arrays.

    host.py, device.py   the kernels of the whole call, on other addresses
    template.py          all other calls: checked options, sizes and plan, to which other arrays are bound

LINATTN_REPLAY=0 in the environment at import disables replay; `clear()` deletes all plans.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from ...runtime.held import empty_all

MOST = 512  # recorded plans at most
MOST_BYTES = 64 << 20  # of all plans in host memory, and as many on a device
LEAST = 16 << 10  # bytes of the Python objects of a plan, where it does not say more

ENABLED = os.environ.get("LINATTN_REPLAY", "1") != "0"


class Recorded(NamedTuple):
    """The recorded plan of a plain call.

    plan: (arrays, state, pointers) -> (out, state), or None if the call must be computed in full.
    returns_state: whether the call returns (out, state). is_limited: whether it has the option num_threads.
    reason: why the plan does not compute the whole call; empty if it does.
    """

    plan: Callable[[Any, Any, Any], tuple[Any, Any] | None]
    returns_state: bool
    is_limited: bool
    reason: str = ""


class Composed(NamedTuple):
    """The vjp of a call that is composed of others, which are replayed: from its signature."""

    vjp: Callable[[Any], Any]


by_key: dict[Hashable, Any] = {}  # by key: Recorded; of a vjp Template, Composed, host.Forward or device.Forward
held: tuple[dict[Hashable, int], dict[Hashable, int]] = {}, {}  # bytes of each plan in host memory, and on a device


def store(key: Hashable, plan: Any) -> None:
    """Record a plan, in place of the oldest ones if all would exceed MOST or MOST_BYTES.

    A plan, or the object that it is a method of, says what it holds: `nbytes` in host memory, LEAST without, and
    `device_nbytes`, 0 without. A plan that has grown is stored again.
    """
    if not ENABLED:
        return
    by_key[key], (host, device) = plan, held
    host[key], device[key] = size_of(plan)
    while len(host) > MOST or max(sum(host.values()), sum(device.values())) > MOST_BYTES:
        oldest, *_ = host  # in one step: other threads may record
        for each in (by_key, host, device):
            each.pop(oldest, None)


def size_of(plan: Any) -> tuple[int, int]:
    """Bytes of a plan in host memory and on a device."""
    run = plan.plan if type(plan) is Recorded else plan
    owner = getattr(run, "__self__", run)
    return getattr(owner, "nbytes", LEAST), getattr(owner, "device_nbytes", 0)


def count() -> int:
    """The number of recorded plans."""
    return len(by_key)


def clear() -> None:
    """Delete every recorded plan."""
    for each in (by_key, *held):
        each.clear()


def clear_cache() -> None:
    """Free what calls keep in memory for later ones, in this process.

    Recorded plans, on the host and on devices; tables of feature maps and sizes; scratch memory of the calling thread
    and of helper threads that wait for work. The next calls are first calls again. Compiled code stays, in memory and
    on disk.
    """
    clear()
    empty_all()


def computed_in_full(arrays: list[Any], state: Any, pointers: None) -> None:
    """The plan of calls that are always computed in full."""
