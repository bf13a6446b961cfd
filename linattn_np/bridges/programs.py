"""A call of fixed shapes as functions from arrays to arrays, which a compiled program calls at run time.

    forward     arrays -> results
    saving      arrays -> results, residuals, key
    backward    arrays, saved results, residuals, key, cotangents of the results -> gradients
    pullback    arrays, cotangents of the results -> gradients, without residuals

The residuals of `la.vjp` are arrays (residuals.py). Their shapes must be known before the call runs, so
`saved` computes one call of these shapes on constant arrays. The key is that of the program that computed the
residuals, 0 if they are not as announced. A backward that is given another key than its own computes the forward first.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..call.dispatch import run
from ..call.vjp import run_vjp
from ..runtime.arrays import Array
from ..runtime.shapes import flatten
from ..spec import VariantSpec
from .linearise import Linearised, linearise
from .residuals import Separation, rebuild
from .shapes import Abstract, result_of

FILL = 2.0**-20  # of constant arrays: no sum overflows, no ridge is 0
LARGE = 1 << 12  # bytes; smaller results are copied
MEMORY = "linattn_np.runtime.pieces.memory"
NOTHING = np.empty(0)
KEY = Abstract((), np.dtype(np.uint32))


class Signature(NamedTuple):
    """A call without its arrays; state: the type of a state of several arrays."""

    spec: VariantSpec
    names: tuple[str, ...]  # of the arrays given; "state", or "state.S", "state.z", ... come last
    state: type[Any] | None
    options: tuple[tuple[str, Hashable], ...]

    def __hash__(self) -> int:
        return hash((id(self.spec), *self[1:]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self.spec is other.spec and self[1:] == other[1:]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def keywords(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The keywords of the call on these arrays."""
        given = dict(zip(self.names, arrays, strict=True))
        parts = [given.pop(n) for n in self.names if is_state(n)]
        state = None if not parts else parts[0] if self.state is None else self.state(*parts)
        return {**dict(self.options), **given} | ({} if state is None else {"state": state})


def is_state(name: str) -> bool:
    """Whether an array is a state, or a part of one."""
    return name.partition(".")[0] == "state"


def leaves(x: Any) -> Iterator[Any]:
    """The arrays of a result, without None."""
    if isinstance(x, tuple) and not isinstance(x, Abstract):
        for part in x:
            yield from leaves(part)
    elif x is not None:
        yield x


def unleaves(like: Any, values: Iterator[Any]) -> Any:
    """The inverse of leaves."""
    if isinstance(like, tuple) and not isinstance(like, Abstract):
        return type(like)(*(unleaves(part, values) for part in like))
    return None if like is None else next(values)


class SavedArrays(NamedTuple):
    """The residuals of a program: the results that are among them, by position, and the other arrays."""

    structure: Any
    saved_results: tuple[int, ...]
    extras: tuple[Abstract, ...]
    linearised: Any  # without arrays; None on a device


class Program:
    """A call of one signature on NumPy arrays of these shapes and dtypes."""

    can_map = True  # whether the residuals of a batch may be the stacked residuals of its rows

    def __init__(self, signature: Signature, given: tuple[Abstract, ...]):
        """Raises the errors of the call."""
        self.signature, self.given, spec = signature, given, signature.spec
        keywords = signature.keywords(given)
        arrays = {n: keywords.pop(n) for n in signature.names if n in spec.arrays}
        self.result = result_of(spec, arrays, keywords.pop("state", None), keywords)
        self.results: tuple[Abstract, ...] = tuple(leaves(self.result))
        self.is_several = isinstance(self.result, tuple) and not isinstance(self.result, Abstract)
        self._options, self._is_plain = dict(signature.options), signature.state is None
        text = repr((spec.name, *signature[1:], given))
        self.key = zlib.crc32(text.encode()) or 1

    # before a call

    @functools.cached_property
    def saved(self) -> SavedArrays | None:
        """The residuals; None if a backward begins with the forward."""
        samples = [np.full(x.shape, FILL, x.dtype) for x in self.given]
        for x in samples:
            x.flags.writeable = False
        try:
            with np.errstate(all="ignore"):
                found = linearise(self.signature.spec, self.signature.keywords(samples))
            if found is None:
                return None
            structure, separation = self._separated(samples, *found)
        except (LookupError, ValueError, ArithmeticError):  # other numbers may do better
            return None
        first = len(samples)
        saved_results = tuple(n for n in range(len(self.results)) if first + n in separation.used)
        extras = tuple(Abstract(x.shape, x.dtype) for x in separation.extras)
        return SavedArrays(
            structure, saved_results, extras, found[0]._replace(call=found[0].call.without_arrays(), computed=None)
        )

    @property
    def saving_results(self) -> tuple[Abstract, ...]:
        """What `saving` fills."""
        return (*self.results, *(self.saved.extras if self.saved else ()), KEY)

    def outputs(self, kind: str) -> tuple[Abstract, ...]:
        """What a function of the program fills."""
        return {"forward": self.results, "saving": self.saving_results}.get(kind, self.given)

    def scratch(self, kind: str) -> tuple[Abstract, ...]:
        """Memory that it takes besides."""
        return ()

    @functools.cached_property
    def unsaved(self) -> Program:
        """The program without residuals, for arrays on another device than expected."""
        program = copy.copy(self)
        program.__dict__["saved"] = None
        return program

    @property
    def residuals(self) -> tuple[Abstract, ...]:
        """What `backward` takes between the arrays and the cotangents."""
        return (*(self.results[n] for n in self.saved_results), *self.saving_results[len(self.results) :])

    @property
    def saved_results(self) -> tuple[int, ...]:
        """The positions of the results that `backward` takes."""
        return self.saved.saved_results if self.saved else ()

    # the call

    def keywords(self, arrays: Sequence[Array]) -> dict[str, Any]:
        """The keywords of the call on these arrays."""
        if self._is_plain:
            return {**self._options, **dict(zip(self.signature.names, arrays, strict=True))}
        return self.signature.keywords(arrays)

    def forward(self, out: Sequence[Array], given: Sequence[Array]) -> None:
        """out: the results."""
        out = out[: len(self.results)]
        keywords = self.keywords(given)
        if keywords.get("overwrite_state"):  # a state of the caller is not written to
            state = keywords["state"]
            keywords["state"] = type(state)(*(S.copy() for S in state)) if isinstance(state, tuple) else state.copy()
        with writing_to(out) as put:
            put(leaves(run(self.signature.spec, (), keywords)))

    def saving(self, out: Sequence[Array], given: Sequence[Array]) -> None:
        """out: the results, the residuals, the key."""
        *out, key = out
        if self.saved is None:
            key[...] = 0
            self.forward(out, given)
            return
        with writing_to(out) as put:
            found = linearise(self.signature.spec, self.keywords(given))
            assert found is not None
            structure, separation = self._separated(given, *found, like=self.saved.structure)
            extras = tuple(Abstract(x.shape, x.dtype) for x in separation.extras)
            same = structure == self.saved.structure and extras == self.saved.extras
            rest = separation.extras if same else (np.zeros(x.shape, x.dtype) for x in self.saved.extras)
            put((*self._public(found[1]), *rest))
        key[...] = self.key if same else 0

    def backward(self, out: Sequence[Array], given: Sequence[Array]) -> None:
        """given: arrays, saved results, residuals, key, cotangents. out: the gradients, in the order of the arrays."""
        count, results = len(self.given), len(self.results)
        arrays, (*rest, key), cotangents = given[:count], given[count:-results], given[-results:]
        if self.saved is None or int(key) != self.key:
            self.pullback(out, (*arrays, *cotangents))
            return
        with writing_to(out[:count]) as put:
            put(self._flat(self._linearised(arrays, rest).gradients(*self._cotangents(cotangents))))

    def pullback(self, out: Sequence[Array], given: Sequence[Array]) -> None:
        """given: arrays, cotangents. out: the gradients."""
        count = len(self.given)
        d = self._cotangents(given[count:])
        with writing_to(out[:count]) as put:
            put(self._flat(run_vjp(self.signature.spec, (), self.keywords(given[:count]))[1](*d)))

    def _cotangents(self, flat: Sequence[Array]) -> tuple[Any, ...]:
        """(dout, dstate), or (dout, dstate, dstates), in the form that the pullback takes.

        A cotangent of zeros may be None.
        """
        if not self.is_several:
            return flat[0], None
        left = iter(flat)
        return tuple(None if part is None else _whole(unleaves(part, left), part) for part in self.result)

    def _flat(self, grads: Any) -> list[Array]:
        """The gradients in the order of the arrays."""
        named = grads._asdict()
        named |= flatten("state", named["state"])
        return [named[n] for n in self.signature.names]

    def _linearised(self, arrays: Sequence[np.ndarray], rest: Sequence[np.ndarray]) -> Linearised:
        """The call from its arrays, and the saved results and residuals."""
        saved = self.saved
        assert saved is not None
        results = [NOTHING] * len(self.results)
        for n, x in zip(saved.saved_results, rest, strict=False):
            results[n] = x.astype(self.results[n].dtype, copy=False)
        pool = [*arrays, *results, *rest[len(saved.saved_results) :]]
        call, computed = rebuild(saved.structure, pool)
        return saved.linearised._replace(call=call, computed=computed)

    def _public(self, found: tuple[Any, Any]) -> Iterator[Array]:
        """The results of a call, from its (out, state)."""
        return leaves(found if self.is_several else found[0])

    def _separated(
        self, given: Sequence[np.ndarray], linearised: Linearised, found: tuple[Any, Any], like: Any = None
    ) -> tuple[Any, Separation]:
        """The structure of the residuals, and their arrays. Results that are not dense are no place of residuals."""
        results = [x if x.flags.c_contiguous else NOTHING for x in self._public(found)]
        separation = Separation([*given, *results])
        return separation.structure((linearised.call, linearised.computed), like), separation


def _whole(d: Any, like: Any) -> Any:
    """The cotangent of a state of several arrays: all of them, or None."""
    if not isinstance(d, tuple):
        return d
    if all(x is None for x in d):
        return None
    return type(d)(*(np.zeros(y.shape, y.dtype) if x is None else x for x, y in zip(d, like, strict=True)))


@contextlib.contextmanager
def writing_to(out: Sequence[Array]) -> Iterator[Callable[[Iterable[Array]], None]]:
    """Compiled loops write into NumPy arrays `out` where shapes and dtypes agree. Gives the function out = values."""
    memory = sys.modules.get(MEMORY)  # without compiled loops there are only copies
    large = [x for x in out if x.nbytes >= LARGE] if memory is not None and type(out[0]) is np.ndarray else []
    if memory is None or not large:
        yield functools.partial(_copy, out)
        return
    with memory.destinations.filled(large) as left:
        yield lambda values: (_copy if len(left) == len(large) else functools.partial(_put, memory.first_byte))(
            out, values
        )


def _copy(out: Sequence[Array], values: Iterable[Array]) -> None:
    for x, y in zip(out, values, strict=True):
        x[...] = y


def _put(first_byte: Callable[[Array], int], out: Sequence[Array], values: Iterable[Array]) -> None:
    """out = values; values may be views of `out`, at other places: those are copied before anything is written."""
    values, begins = list(values), [first_byte(x) for x in out]
    places = [(at, at + x.nbytes, n) for n, (x, at) in enumerate(zip(out, begins, strict=True))]
    for n, y in enumerate(values):
        at = first_byte(y)
        if any(low <= at < high and m != n for low, high, m in places):
            values[n] = y.copy()
    for x, y, at in zip(out, values, begins, strict=True):
        if not (first_byte(y) == at and y.nbytes == x.nbytes and y.dtype == x.dtype and y.flags.c_contiguous):
            x[...] = y
