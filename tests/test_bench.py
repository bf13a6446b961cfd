"""Records of measurements: JSON files with a row a line, whose rows the program that measures chooses."""

from __future__ import annotations

import json

import pytest

record = pytest.importorskip("bench.record", reason="an installed package has no measurements")


def test_a_record_reads_back_and_has_a_row_a_line():
    row = {"shape": [1, 2], "times": {"forward": 1.5, "both": None}}
    result = {"date": "2026-01-01", "versions": {"numpy": "2"}, "cores": 2, "rows": [row, row], "parts": {"a": row}}
    text = record.text(result)
    assert json.loads(text) == result
    assert text.count(json.dumps(row)) == 3
    assert len(text.splitlines()) == 2 + 2 + 4 + 3  # braces, header and versions, rows, parts


@pytest.mark.parametrize(
    "x", [{}, {"rows": []}, {"at": [1, 2]}, {"rows": [{"a": [{"b": 1}]}]}, {"a": {"b": {"c": {"d": {}}}}}]
)
def test_every_nesting_reads_back(x):
    assert json.loads(record.text(x)) == x


def test_a_comparison_keeps_one_thread_and_the_last_shape_of_several():
    compare = pytest.importorskip("bench.compare")
    rows = [{"threads": threads, "shape": [shape], "name": name}
            for threads in (1, 2) for shape in (3, 4) for name in "ab"]  # fmt: skip
    kept = compare.summary(rows)
    assert [(row["threads"], *row["shape"]) for row in kept] == [(1, 3), (1, 3), (1, 4), (1, 4), (2, 4), (2, 4)]


def test_changes_keep_the_first_and_the_slowest_pair_of_a_function():
    changes = pytest.importorskip("bench.changes")
    small, large = changes.SHAPES[0], changes.SHAPES[-1]
    found = {f"{name}, {shape}, {kind}": (changed, 2.0, True)
             for name, changed in (("one", 2.0), ("one a, b", 3.0), ("one c", 8.0), ("other", 1.0))
             for shape in (small, large) for kind in ("new", "vjp")}  # fmt: skip
    kept = changes.summary(found)
    assert [row["call"] for row in kept] == ["one", "one c", "other"]
    assert kept[1]["vjp"] == {"changed": 8.0, "ready": 2.0, "ratio": 4.0}


def test_the_page_of_claims_is_what_was_measured():
    from bench import claims, record

    tasks = json.loads((record.RESULTS / "claims.json").read_text())["tasks"]
    text = claims.PAGE.read_text()
    assert claims.page(text, tasks) == text
    assert set(tasks) <= set(claims.SETTINGS)
