"""The property tests of tests/properties and tests/call for any function, as far as traits of its spec drive them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.cases import GROWING, Case, Pairs, covered

NEEDS: dict[str, Callable[[Case], bool]] = {  # tests whose list of cases is chosen by a trait
    "test_write_without_reading": lambda case: case.spec.change.query in case.given,
    "test_queries_get_no_gradient_when_there_are_none": lambda case: case.spec.change.query in case.given,
    "test_queries_of_their_own_length": lambda case: not case.causal,
    "test_attention_without_a_cache_gives_what_a_first_call_gives": lambda case: case.fn in GROWING,
    "test_two_halves_are_the_whole": lambda case: case.causal,
    "test_no_later_token_changes_an_earlier_output": lambda case: case.causal,
    "test_no_earlier_strength_changes_a_later_gradient_of_v": lambda case: case.erases and "beta" in case.given,
    "test_one_sum_where_a_key_also_erases": lambda case: case.erases,
    "test_overlapping_arrays": lambda case: {"q", "k"} <= case.given.keys(),
    "test_read_equals_the_output_of_the_last_query": lambda case: case.spec.change.query in case.given,
    "test_nothing_comes_back_across_a_reset": lambda case: (
        "g" in case.given and case.on_tokens("g") and not case.looks_back
    ),
    "test_adjoint_dot_product": lambda case: case.is_linear,
    "test_influence_matrix_is_the_call": lambda case: case.is_linear,
    "test_influence_matrix_does_not_depend_on_the_values": lambda case: case.is_linear,
    "test_influence_matrix_of_grouped_heads_and_packed_sequences": lambda case: (
        case.is_linear and case.spec.shares_states and "Hq" in " ".join(case.given.values())
    ),
}


def properties(case: Case, *modules: ModuleType) -> list[Any]:
    """(test, its other arguments) of every test of the modules that applies to a case, as pytest parameters."""
    found = []
    for module in modules:
        for name, test in vars(module).items():
            if not name.startswith("test_") or "case" not in inspect.signature(test).parameters:
                continue
            if NEEDS.get(name, lambda _: True)(case):
                found += [pytest.param(test, keywords, id=_id(module, name, keywords))
                          for keywords in _keywords(case, test)]  # fmt: skip
    return found


def _keywords(case: Case, test: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """The sets of a test's other arguments that are covered; none if it takes fixtures."""
    lists: dict[str, list[Any]] = {}
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize" and mark.args[0] != "case":
            name, values = mark.args
            if name == ("case", "name"):
                name, values = "name", filter(case.on_tokens, case.given)
            if isinstance(values, Pairs):
                lists |= {n: _distinct(row[i] for row in values) for i, n in enumerate(name[1:], 1)}
                continue
            lists[name] = list(values)
    if inspect.signature(test).parameters.keys() - {"case", "monkeypatch"} != lists.keys():
        return
    for values in itertools.product(*lists.values()):
        keywords = dict(zip(lists, values, strict=True))
        asked = [
            v if isinstance(v, dict) else {"backend": v}
            for n, v in keywords.items()
            if n in ("form", "how", "backend") and (isinstance(v, dict) or n == "backend")
        ]
        if all(covered(case, [how]) == [how] for how in asked):
            yield keywords


def _distinct(values: Iterator[Any]) -> list[Any]:
    """In order of their first occurrence; dictionaries have no hash."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _id(module: ModuleType, name: str, keywords: dict[str, Any]) -> str:
    words = [module.__name__.rsplit(".", 1)[-1].removeprefix("test_"), name.removeprefix("test_")]
    return "-".join([*words, *(str(getattr(v, "__name__", v)) for v in keywords.values())])
