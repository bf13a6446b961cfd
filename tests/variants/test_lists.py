"""Specs, docstrings, loops and the lists of docs agree."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linattn_np as la
from bench import compare
from bench.__main__ import COMPARED
from bench.cpu import variants
from linattn_np.call.options import COMMON
from linattn_np.docstring import docstring
from tests.cases import has_plain_state
from tests.naive import NAIVE

ROOT = Path(la.__file__).parent
DOCS = ROOT.parent / "docs"


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("text", ["written", "by the spec"])
def test_docstring_has_every_array_with_its_shape(fn, text):
    text = fn.__doc__ if text == "written" else docstring(fn.spec)
    lines = [line.strip() for line in text.splitlines()]
    for name, given in fn.spec.arrays.items():
        described = next((line for line in lines if line.split(" ")[0] == name and "(" in line), None)
        assert described, f"{fn.__name__} does not describe {name}"
        for axes in given.axes.split("|"):
            letters = axes.split()
            if letters[0] == "T":
                letters.insert(0, "...")
            shape = f"({letters[0]},)" if len(letters) == 1 else f"({', '.join(letters)})"
            assert shape in described, f"{fn.__name__}: {name} is {shape} on its spec, not so in: {described}"


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("text", ["written", "by the spec"])
def test_docstring_has_equation_options_and_paper(fn, text):
    text = fn.__doc__ if text == "written" else docstring(fn.spec)
    symbol = "h_t = " if fn.spec.row_axes == 1 and fn.spec.state.parts is None else "S_t = "
    assert symbol in text or "state" not in fn.spec.core.STATE_AXES  # a cache has no equation
    assert "out_t = " in text
    assert "Raises" in text
    assert "Returns" in text
    assert f"scale=None means {'K**-0.5' if fn.spec.scaled else '1'}." in text
    for option in fn.spec.options:
        assert option in text, f"{fn.__name__} does not explain {option}"
    for source in re.findall(r"arXiv [\d.]+", fn.spec.paper) or [fn.spec.paper]:  # "": not published
        assert source in text, f"{fn.__name__}: {source} is on its spec only"


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_every_variant_is_in_every_list(fn):
    assert fn.__name__ == fn.spec.name
    assert getattr(la, fn.spec.name) is fn
    assert fn.spec in la.SPECS
    assert fn.spec.name in NAIVE
    assert f"`{fn.spec.name}`" in la.family_table()


@pytest.mark.skipif(not DOCS.is_dir(), reason="an installed package has no pages")
def test_every_variant_has_a_section_and_every_section_a_variant():
    text = (DOCS / "variants.md").read_text("utf-8")
    headings = [name for line in re.findall(r"^## (.*)$", text, re.MULTILINE) for name in line.split(", ")]
    assert sorted(headings) == sorted(spec.name for spec in la.SPECS)


def test_every_variant_has_a_title_of_its_own():
    titles = [spec.title for spec in la.SPECS]
    assert len(set(titles)) == len(titles)


def test_no_loop_without_a_variant():
    assert NAIVE.keys() == {c.name for c in la.SPECS}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_spec_is_copied_and_pickled_as_that_of_its_function(copied):
    for fn in la.VARIANTS:
        assert copied(fn) is fn
        assert copied(fn.spec) is fn.spec
    other = dataclasses.replace(la.gla.spec, name="other")  # without a function
    assert copy.copy(other) == other


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_the_signature_is_that_of_the_spec(fn):
    parameters = inspect.signature(fn).parameters
    arrays = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert arrays == list(fn.spec.arrays)
    for name, given in fn.spec.arrays.items():
        assert (parameters[name].default is None) == given.optional
    common = [
        "scale",
        "state",
        "return_state",
        "return_states_at",
        "overwrite_state",
        "state_rows",
        "fresh",
        "reverse",
        "cu_seqlens",
        "chunk_size",
        "chunk_states",
        "precision",
        "num_threads",
        "layout",
        "backend",
        "check",
    ]
    assert list(parameters)[len(arrays) :] == [*fn.spec.options, *common]


@pytest.mark.parametrize("fn", la.VARIANTS, ids=lambda fn: fn.__name__)
def test_a_row_of_the_benchmarks_follows_from_every_spec(fn):
    case = variants.by_spec(fn.__name__)
    calls = compare.ours(fn.__name__, case.draw((1, 8, 1, 4)), False)
    assert calls
    assert all(np.isfinite(call()).all() for call in calls.values())
    assert fn.__name__ in COMPARED


def test_the_lists_that_are_written_are_up_to_date():
    script = ROOT.parent / "docs" / "make_lists.py"
    ran = subprocess.run([sys.executable, str(script), "--check"], cwd=ROOT.parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", ["functions", "variants", "testing"])
def test_the_reference_shows_the_signatures(page):
    """Names and kinds of parameters; **options stands for the common options of a variant; those of a piece are left
    out."""
    text = (ROOT.parent / "docs" / "reference" / f"{page}.md").read_text()
    heads = re.findall(r"^```text\nla\.([\w.]+)(\(.*\))$", text, re.MULTILINE)
    P = inspect.Parameter
    assert heads
    for name, head in heads:
        fn: Any = la
        for part in name.split("."):
            fn = getattr(fn, part)
        shown = ast.parse(f"lambda {head[1:-1]}: 0", mode="eval").body.args  # type: ignore[attr-defined]
        common = COMMON if hasattr(fn, "spec") else la.nn.COMMON if hasattr(fn, "piece") else ()
        each: dict[Any, list[str]] = {kind: [] for kind in type(P.POSITIONAL_ONLY)}
        for n, p in inspect.signature(fn).parameters.items():
            each[p.kind] += [n] if n not in common else []
        extra = ["options"] if hasattr(fn, "spec") else []
        assert [a.arg for a in shown.posonlyargs] == each[P.POSITIONAL_ONLY], name
        assert [a.arg for a in shown.args] == each[P.POSITIONAL_OR_KEYWORD], name
        assert [a.arg for a in shown.kwonlyargs] == each[P.KEYWORD_ONLY], name
        assert [a.arg for a in (shown.vararg, shown.kwarg) if a] == each[P.VAR_POSITIONAL] + each[P.VAR_KEYWORD] + extra


@pytest.mark.parametrize(
    "fn",
    [
        fn
        for fn in la.VARIANTS
        if fn.spec.erase.name != "NONE" and "g" in fn.spec.arrays and has_plain_state(fn.spec) and not fn.spec.grows
    ],
    ids=lambda fn: fn.__name__,
)
def test_the_state_that_an_erase_reads_is_the_one_of_the_spec(fn):
    """After a reset the decayed state is 0; with value 0, the new state shows which state the erase read."""
    arrays = la.testing.sample(fn, np.random.default_rng(0), T=1)
    arrays |= {"g": np.full_like(arrays["g"], -np.inf), "v": 0 * arrays["v"]}
    state = np.random.default_rng(1).standard_normal((2, 2, 5, 3))
    end = fn(**arrays, state=state, return_state=True).state
    assert bool(end.any()) == (fn.spec.erase_reads.name == "PREVIOUS")
