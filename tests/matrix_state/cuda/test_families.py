"""The one table of families: each call takes the family that it names, and cuda_src/README.md shows it. No GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest

from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda import calls, choose
from linattn_np.matrix_state.types import EraseKey
from linattn_np.runtime.cuda import launch, sources
from tests.core_cases import case
from tests.matrix_state.cuda.step_twin import CUPY, KINDS, stub

README = (sources.root() / "README.md").read_text("utf-8")
WORDS = {  # the cell of a call of tests/core_cases.py
    (choose.NONE_OR_SCALAR, "none"): (("none", "none"), ("scalar", "none")),
    (choose.NONE_OR_SCALAR, "delta"): (("none", "delta"), ("scalar", "delta")),
    (choose.NONE_OR_SCALAR, "delta, r is not k"): (("none", "delta undecayed"), ("scalar", "delta undecayed")),
    (choose.KEYS, "none"): (("vector", "none"),),
    (choose.KEYS, "delta"): (("vector", "delta"),),
    (choose.KEYS, "delta, r is not k"): (("vector", "delta"),),
    (choose.VALUES, "none"): (("value", "none"),),
    (choose.BOTH, "none"): (("outer", "none"),),
    ("none, key channels", "free"): (("none", "free"), ("vector", "free")),
    ("scalar", "free"): (("scalar", "free"),),
}
CASES = [(cell, *words) for cell, each in WORDS.items() for words in each]


def call_of(cell, decay, erase, element, T=40, K=32):
    """A call of a cell as the kernels get it."""
    x, plan, *_ = case(decay, erase, "after", T, None, (2, 2, 2), K, 32, B=1)
    kinds = dict.fromkeys(x._fields, KINDS[choose.ELEMENTS.index(element)]) | {"beta": np.float32}
    there = x._replace(**{n: stub(y.astype(kinds[n])) for n, y in x._asdict().items() if y is not None})
    erase_key = EraseKey.OWN
    if cell[1] == "delta":
        there, erase_key = there._replace(r=there.k), EraseKey.KEY
    return there, plan._replace(xp=CUPY, dtype=np.float32, erase_key=erase_key)


@pytest.fixture(params=[80, 90, 100])
def card(request, monkeypatch):
    """A device of a compute capability."""
    own = {"current_device": 0, "unusable": None, "capability": request.param, "multiprocessors": 132}
    for name, value in (own | {"shared_limit": policy.GROUP_SHARED}).items():
        monkeypatch.setattr(launch, name, lambda value=value: value)
    monkeypatch.setattr(policy, "PORTABLE", False)
    return request.param


@pytest.mark.parametrize("element", choose.ELEMENTS)
@pytest.mark.parametrize(("cell", "decay", "erase"), CASES, ids=str)
def test_a_call_takes_the_family_of_the_table(card, cell, decay, erase, element):
    x, plan = call_of(cell, decay, erase, element)
    assert choose.cell_of(x, plan) == cell
    family = choose.FAMILIES[choose.first(cell, card, element)]
    assert choose.family_of(x, plan) is family
    assert calls.unsupported_reason(x, plan) is None
    assert calls.describe(x, plan) == family.how(x, plan)
    own = family.unsupported_gradients(x, plan) if family is not choose.token else ""
    assert choose.family_of_gradients(x, plan) is (family if own is None else choose.token)


@pytest.mark.parametrize(("cell", "decay", "erase"), CASES, ids=str)
def test_a_few_tokens_take_one_kernel_in_every_cell(card, cell, decay, erase):
    x, plan = call_of(cell, decay, erase, "bfloat16", T=policy.SHORT_CUDA)
    assert choose.family_of(x, plan) is choose.token


@pytest.mark.parametrize("element", choose.ELEMENTS)
@pytest.mark.parametrize("T", [40, policy.FLOAT32_RECURRENCE + 1])
def test_keys_too_wide_for_a_family_are_cut_before_it(card, element, T):
    """Blocks of 256 channels, but where the kernels of 128 channels cut the call themselves."""
    x, plan = call_of((choose.KEYS, "none"), "vector", "none", element, T, K=512)
    inside = card == 90 and element == "bfloat16"
    assert ("wide_keys" in calls.handles(x, plan)) == inside
    assert ("in 2 blocks" in calls.describe(x, plan)) != inside


def test_every_cell_has_a_row_and_every_family_a_cell():
    assert set(WORDS) == set(choose.CELLS)
    assert {name for row in choose.CELLS.values() for name in row} == set(choose.FAMILIES)


def rows_of(title):
    """The rows of the table after a heading of the README, without its head."""
    section = README.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[word.strip() for word in line.strip("|").split("|")] for line in lines[2:]]


def test_the_readme_shows_the_table():
    expected = []
    for cell in choose.CELLS:
        named = [choose.first(cell, *on) for on in ((90, "bfloat16"), (90, "float32"), (80, "bfloat16"))]
        assert named[1] == named[2] == choose.first(cell, 120, "float16")
        expected.append([*cell, *(f"`{name}`" for name in named[:2])])
    assert rows_of("Which family computes a call") == expected


def test_the_readme_names_the_file_of_every_gradient():
    """Of each array of each family: files that exist, and that every entry of the family's backward is among."""
    rows = rows_of("Where a gradient is computed")
    named = {row[0].strip("`") for row in rows}
    assert named == set(choose.FAMILIES) - {"vector/widths"}
    for row in rows:
        for file in re.findall(r"`([\w/]+\.cu)`", " ".join(row[1:])):
            assert (sources.root() / file).is_file(), (row[0], file)
