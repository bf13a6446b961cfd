"""A new variant is its file and its loop: no test, list or function needs a word more.

The variants of extended/new are written as docs/internals/adding_a_variant.md says, and found by the catalog: an output
gate, no paper, a function of the values, and output gates of queries that share states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linattn_np as la
from linattn_np import catalog, variants
from linattn_np.docstring import docstring
from tests.call import test_calls, test_layouts, test_pullback, test_stored_states
from tests.cases import PLAIN, cases_of, draw
from tests.properties import test_catalog, test_influence, test_numerics, test_sequences
from tests.properties.of_any import properties
from tests.variants import test_lists
from tests.variants.extended import loops

FOLDER = Path(__file__).parent / "extended"


@contextmanager
def extended() -> Iterator[None]:
    """The catalog of the variants in FOLDER alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "FOLDER", FOLDER)
        patch.setattr(variants, "__path__", [*variants.__path__, str(FOLDER)])
        _forget()
        yield
    _forget()


def _forget() -> None:
    catalog.modules.cache_clear()
    catalog.variants.cache_clear()


with extended():
    NEW = {fn.__name__: fn for fn in catalog.VARIANTS}

CASES = [case for name, fn in NEW.items() for case in cases_of(fn, getattr(loops, name))]
MODULES = (test_catalog, test_sequences, test_numerics, test_influence, test_calls, test_layouts, test_pullback,
           test_stored_states)  # fmt: skip
every = pytest.mark.parametrize("fn", NEW.values(), ids=list(NEW))


def test_the_catalog_finds_them():
    assert set(NEW) == {"gated_output", "unpublished", "silu_values", "gated_readers"}
    assert catalog.VARIANTS == la.VARIANTS


@pytest.mark.parametrize(
    ("case", "test", "keywords"),
    [
        pytest.param(case, *p.values, id=f"{case}-{p.id}")
        for case in CASES
        for p in properties(case, *MODULES)
        if "monkeypatch" not in p.values[0].__code__.co_varnames
    ],
)
def test_properties(case, test, keywords):
    test(case, **keywords)


@every
@pytest.mark.parametrize("text", ["written", "by the spec"])
def test_docstrings(fn, text):
    test_lists.test_docstring_has_every_array_with_its_shape(fn, text)
    test_lists.test_docstring_has_equation_options_and_paper(fn, text)
    test_lists.test_the_signature_is_that_of_the_spec(fn)
    assert docstring(fn.spec).endswith(f"{fn.spec.paper}." if fn.spec.paper else "linattn_np.Options.")


def test_lists_and_sections_follow():
    from docs.make_lists import skeleton

    with extended():
        table = la.family_table().splitlines()
        assert [line.split("`")[1] for line in table[2:]] == [spec.name for spec in catalog.SPECS]
    for fn in NEW.values():
        text = skeleton(fn.spec)
        assert text.startswith(f"## {fn.__name__}\n\n{fn.spec.paper}" if fn.spec.paper else f"## {fn.__name__}\n\n```")
        assert "\n\n.\n" not in text


def test_outputs_are_read_where_they_are_not_mapped():
    """la.read equals the last output of variants that return the plain read-out."""
    read = {name: case.is_readable(*draw(case.required, T=3)) for case in CASES for name in [case.fn.__name__]}
    assert read == {"gated_output": False, "unpublished": True, "silu_values": True, "gated_readers": False}
    assert sum(case.required.is_readable(*draw(case.required, T=3)) for case in PLAIN) > 15


def test_an_influence_matrix_needs_outputs_that_are_linear():
    x = la.testing.sample(NEW["silu_values"], np.random.default_rng(0), T=3)
    with pytest.raises(TypeError, match="influence_matrix: silu_values is not linear in v, expected a variant that is"):
        la.influence_matrix(NEW["silu_values"], **x)


def test_a_change_of_variables_names_arrays_of_the_variant():
    arrays: dict[str, Any] = {n: a for n, a in NEW["silu_values"].spec.arrays.items() if n != "v"}
    with pytest.raises(ValueError, match="short: the value of its change is 'v', expected one of q, k, beta"):
        la.spec.VariantSpec("short", "", "", "", arrays, NEW["silu_values"].spec.change)
