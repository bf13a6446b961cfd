"""Every Python block of the README and of docs/ runs; the blocks of a file share their names."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if p.is_file()]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line number, source) of the Python blocks of a page."""
    text = page.read_text("utf-8")
    return [(text.count("\n", 0, m.start(1)) + 1, m.group(1)) for m in BLOCK.finditer(text)]


WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.mark.skipif(not PAGES, reason="an installed package has no pages")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for line, source in blocks(page):
        code = compile("\n" * (line - 1) + source, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, names)


@pytest.mark.skipif(not (ROOT / "bench" / "results").is_dir(), reason="an installed package has no results")
def test_the_page_of_measurements_is_made_from_the_measurements():
    made = subprocess.run([sys.executable, ROOT / "docs" / "make_performance.py", "--check"], check=False)
    assert made.returncode == 0


PROMISE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.skipif(not PAGES, reason="an installed package has no pages")
def test_every_promise_names_a_test_that_exists():
    rows = [line for line in (ROOT / "docs" / "accuracy.md").read_text("utf-8").splitlines() if "`tests/" in line]
    assert len(rows) >= 30
    for row in rows:
        found = PROMISE.search(row)
        assert found, row
        path, name = found.groups()
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE), f"{path}::{name}"
