"""States of pieces that mix tokens: their last inputs, one state a sequence, or rows of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..call.overwrite import check_overwritten
from ..runtime.arrays import STORAGE, Array, Library, cast, is_mutable
from ..runtime.doorway import expect
from ..runtime.pools import StateRows, check_rows, put_rows, take_rows
from ..runtime.recorder import refuse

OPTIONS = {"state": None, "return_state": False, "overwrite_state": False, "state_rows": None}


class States(NamedTuple):
    """The caller's state, its rows of a pool, and what a call does with the final states."""

    whole: Array | None
    rows: StateRows | None
    lead: tuple[int, ...]  # the axes of one state a sequence
    returned: bool
    overwritten: bool

    @property
    def is_dense(self) -> bool:
        """Whether a kernel reads it, and its rows of a pool, where it lies."""
        return self.whole is not None and bool(self.whole.flags.c_contiguous)

    def begin(self, library: Library) -> Array | None:
        """The states that sequences begin with."""
        return self.whole if self.rows is None else take_rows(library.xp, self.whole, self.rows, self.lead)

    def end(self, library: Library, S: Array) -> Array:
        """The final states, written to the caller's array with overwrite_state."""
        if self.whole is None or S is self.whole:
            return S
        S = cast(library.xp, S, self.whole.dtype)
        if not self.overwritten or not is_mutable(library.xp):
            return S
        refuse("the final state is copied into the caller's array")
        put_rows(library.xp, self.whole, self.rows or StateRows(None), S)
        return self.whole


def states_of(
    fn: str, library: Library, given: Mapping[str, Any], state: Array | None, sizes: dict[str, Any], N: int | None
) -> States:
    """The checked state of a call; sizes: by letter, "tail" the axes of a state; N: sequences of a ragged batch."""
    lead, rows = sizes["..."] if N is None else (N,), None
    if state is None:
        for name in ("overwrite_state", "state_rows"):
            if given[name] is not None and given[name] is not False:
                raise ValueError(f"{fn}: {name} was given without a state, expected both")
        return States(None, None, lead, given["return_state"], False)
    pool = given["state_rows"] is not None
    letters = sizes["tail"].removesuffix("?")
    expect(fn, {k: n for k, n in sizes.items() if k != "..."} | ({} if pool else {"...": lead}), STORAGE,
           state=(state, f"{'P' if pool else '...'} {letters}"))  # fmt: skip
    if pool:
        batch = {"...": sizes["..."]} | ({} if N is None else {"sequences": N})
        rows = check_rows(fn, library.xp, (given["state_rows"], None), batch, {"state": (state, letters)})
    if given["overwrite_state"]:
        plan = SimpleNamespace(dtype=state.dtype)  # any dtype that holds the inputs
        check_overwritten(fn, {"state": state}, plan, {"state": state})
    return States(state, rows, lead, given["return_state"], given["overwrite_state"])
