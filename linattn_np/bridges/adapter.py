"""Functions with the signature of another library, computed by one of ours: arguments by name, options translated."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import linattn_np as la

from . import torch as _  # noqa: F401  # here, since torch.compile cannot trace the import in a first call

REQUIRED = inspect.Parameter.empty
Given = dict[str, Any]  # every parameter of the call by its name


class Parameters(NamedTuple):
    """The parameters of a function, in order, with their defaults."""

    names: tuple[str, ...]
    defaults: dict[str, Any]
    required: frozenset[str]


def parameters(text: str, defaults: Mapping[str, Any]) -> Parameters:
    """Those listed in `text`: 'q k v g=None scale'; the default of a bare name is in `defaults`, or it has none."""
    values = {}
    for part in text.split():
        name, given, value = part.partition("=")
        values[name] = ast.literal_eval(value) if given else defaults.get(name, REQUIRED)
    return Parameters(tuple(values), {n: x for n, x in values.items() if x is not REQUIRED},
                      frozenset(n for n, x in values.items() if x is REQUIRED))  # fmt: skip


def bound(fn: str, known: Parameters, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Given:
    """All parameters of a call by name.   Raises TypeError for unknown, repeated and missing ones."""
    if len(args) > len(known.names):
        raise TypeError(f"{fn}: {len(args)} positional arguments, expected at most {len(known.names)}")
    given = dict(zip(known.names, args, strict=False))
    for name in keywords:
        if name in given:
            raise TypeError(f"{fn}: {name} is given twice")
        if name not in known.defaults and name not in known.required:
            raise TypeError(f"{fn}: unknown argument {name}, expected one of {', '.join(known.names)}")
    given.update(keywords)
    if missing := known.required - given.keys():
        raise TypeError(f"{fn}: {', '.join(n for n in known.names if n in missing)} not given")
    return known.defaults | given


def with_signature(call: Callable[..., Any], name: str, known: Parameters, doc: str) -> Callable[..., Any]:
    """`call` under this name, with the signature that editors and `inspect` see."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(n, kind, default=known.defaults.get(n, REQUIRED)) for n in known.names]
    call.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    return call


def renamed(fn: str, error: Exception) -> Exception:
    """A TypeError or ValueError of one of our functions as an error of fn, which called it."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return error if str(error).startswith(f"{fn}: ") else kind(f"{fn}: {error}")


def named(name: str, known: Parameters, body: Callable[[str, Given], Any]) -> Any:
    """A function with these parameters that hands them to body(name, given); errors of others get its name."""

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return body(name, bound(name, known, args, keywords))
        except (TypeError, ValueError) as error:
            raise renamed(name, error) from error

    return with_signature(call, name, known, body.__doc__ or "")


class Translated(NamedTuple):
    """A call of one of our functions."""

    fn: str
    arrays: dict[str, Any]
    options: dict[str, Any]


class Library(NamedTuple):
    """What the functions of a library have in common."""

    defaults: Mapping[str, Any]  # of the options, by name
    common: Sequence[str]  # options of every function
    unsupported: Sequence[str]  # options that must have their default
    check: Callable[[str, Given], None]  # raises for arguments that have no translation
    prepare: Callable[[Given], None]  # before the translation
    results: Callable[[Given, Any, Any], tuple[Any, ...]]  # our output and final state, or None -> what they return


def adapter(
    name: str, translate: Callable[[str, Given], Translated], text: str, library: Library
) -> Callable[..., Any]:
    """A function `name` with the parameters `text`, which returns (o, state), or what `library` says.

    Raises ValueError for unsupported arguments, and the errors of our function, with both names in front.
    """
    listed = text.split()
    known = parameters(" ".join([*listed, *(n for n in library.common if n not in listed)]), library.defaults)
    refused = [n for n in library.unsupported if n in known.defaults]
    checked: dict[Any, list[str]] = {}  # which of `refused` a call gives, by its count of arguments and its keywords

    def call(*args: Any, **keywords: Any) -> Any:
        layout = len(args), *keywords
        if layout in checked:
            given = known.defaults | dict(zip(known.names, args, strict=False)) | keywords
        else:
            given = bound(name, known, args, keywords)
            checked[layout] = [n for n in refused if n in keywords or n in known.names[: len(args)]]
        for option in checked[layout]:
            if given[option] is not known.defaults[option]:
                raise ValueError(f"{name}: {option} is not supported, expected {known.defaults[option]}")
        library.check(name, given)
        library.prepare(given)
        fn, arrays, options = translate(name, given)
        try:
            result = getattr(la, fn)(**arrays, **options)
        except (TypeError, ValueError) as error:
            raise renamed(name, error) from error
        out, state = result if options["return_state"] else (result, None)
        return library.results(given, out, state)

    states = "S or None, A or None" if "initial_A_state" in known.names else "final state or None"
    return with_signature(call, name, known, f"{name}({', '.join(known.names)}) of FLA -> (o, {states})")
