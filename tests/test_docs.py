"""Docs: every Python block runs (the blocks of a page share a namespace), every link and every named file exists."""

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
READ = [*PAGES, *(p for p in [ROOT / "cuda_src" / "README.md"] if PAGES and p.is_file())]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|cuh?|json))\b(?::(\w+))?")
SOURCES = ("linattn_np", "cuda_src", "tests", "bench", "docs")


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line number, source) of the Python blocks of a page."""
    text = page.read_text("utf-8")
    return [(text.count("\n", 0, m.start(1)) + 1, m.group(1)) for m in BLOCK.finditer(text)]


ABOUT = {"coming_from": "torch", "distributed": "jax", "torch_layer": "torch"}  # pages elsewhere than in bridges/
WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.mark.skipif(not PAGES, reason="an installed package has no pages")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(page, tmp_path, monkeypatch):
    if page.parent.name == "bridges" or page.stem in ABOUT:
        pytest.importorskip(ABOUT.get(page.stem, page.stem))  # the framework that the page is about
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for line, source in blocks(page):
        code = compile("\n" * (line - 1) + source, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, names)


@pytest.mark.skipif(not (ROOT / "bench" / "results").is_dir(), reason="an installed package has no results")
def test_the_page_of_measurements_is_made_from_the_measurements():
    script = ROOT / "docs" / "performance" / "make_performance.py"
    assert subprocess.run([sys.executable, script, "--check"], check=False).returncode == 0


PEERS = {"chunk form": "transformers_chunk", "softmax attention": "torch_sdpa"}  # of the table of one CPU thread
FUNCTIONS = {"gated delta rule": "gated_delta_rule", "KDA": "kda"}


@pytest.mark.skipif(not PAGES, reason="an installed package has no pages")
def test_the_figures_of_the_first_page_are_measured():
    """CPU ratios equal the page of measurements; GPU times are in its rows of the same shape."""
    page = (ROOT / "docs" / "performance" / "performance.md").read_text("utf-8")
    speed = (ROOT / "README.md").read_text("utf-8").split("## Speed")[1].split("## More")[0]
    found = 0
    for call, peer, *ratios in re.findall(r"^\| (.*?) \| (.*?) \| ([\d.]*) ?\| ([\d.]*) ?\|$", speed, re.MULTILINE):
        peers = [name for words, name in PEERS.items() if words in peer and "one token" not in call]
        for ratio, what in zip(ratios, ("forward", "forward and backward"), strict=True):
            for name in peers if ratio else ():
                words, shape = call.split(" (")
                row = re.escape(f"| `{FUNCTIONS[words]}`, {what} | ({shape} | 1 |") + rf".*`{name}` ([\d.]+)"
                measured = float(re.search(row, page)[1])
                assert abs(float(ratio) - measured) <= (0.051 if "." in ratio else 0.51), (call, ratio, measured)
                found += 1
    assert found >= 6
    lines = [
        (line, {f"{float(x):.3g}" for x in re.findall(r"(?<![\w.])\d+\.?\d*(?![\w.])", line)})
        for line in page.splitlines()
        if line.startswith("|")
    ]
    rows = re.findall(r"^\| ([\w ]+) \((.*?)\) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", speed, re.MULTILINE)
    assert len(rows) >= 7
    for _, shape, *cells in rows:
        ours, fla, _, fla_both = (f"{float(x):.3g}" for x in cells)
        assert [line for line, numbers in lines if ours in numbers and f"({shape}" in line], (shape, ours)
        assert [line for line, numbers in lines if {fla, fla_both} <= numbers], (shape, fla, fla_both)


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


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text("utf-8"))


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub and MkDocs make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", READ, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page):
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, part = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
        if part:
            headings = re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE)
            assert part in map(anchor, headings), f"{page.relative_to(ROOT)}: {link}"


@pytest.mark.skipif(not (ROOT / "cuda_src").is_dir(), reason="an installed package has no sources beside its pages")
@pytest.mark.parametrize("page", READ, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_that_is_named_exists(page):
    files = [p for folder in SOURCES for p in (ROOT / folder).rglob("*.*")]
    for path, name in set(NAMED.findall(prose(page))):
        found = [p for p in files if f"/{p.relative_to(ROOT).as_posix()}".endswith(f"/{path}")]
        assert found, f"{page.relative_to(ROOT)} names {path}"
        if name:
            word = re.compile(rf"\b{name}\b")
            assert any(word.search(p.read_text("utf-8")) for p in found), f"{page.relative_to(ROOT)}: {path}:{name}"


NAV = ROOT / "mkdocs.yml"


def tutorials() -> list[Path]:
    """The pages of the section Tutorials."""
    section = NAV.read_text("utf-8").split("  - Tutorials:\n")[1].split("\n  - ")[0] if NAV.is_file() else ""
    return [ROOT / "docs" / page for page in re.findall(r": ([\w/]+\.md)$", section, re.MULTILINE)]


@pytest.mark.skipif(not NAV.is_file(), reason="an installed package has no pages")
def test_a_tutorial_runs_and_has_a_picture():
    assert len(tutorials()) >= 8
    for page in tutorials():
        assert page in WITH_CODE, page
        assert re.search(r"^!\[[^\]]{10,}\]\([\w./-]+\.png\)$", page.read_text("utf-8"), re.MULTILINE), page


VARIABLE = re.compile(r"\bLINATTN_[A-Z_]+[A-Z]\b")


@pytest.mark.skipif(not PAGES, reason="an installed package has no pages")
def test_every_environment_variable_is_on_one_page():
    """Those that the package reads: install.md has a row of each."""
    sources = (ROOT / "linattn_np").rglob("*.py")
    read = {name for path in sources for name in VARIABLE.findall(path.read_text("utf-8"))}
    assert "LINATTN_CACHE_DIR" in read
    assert set(VARIABLE.findall((ROOT / "docs" / "install.md").read_text("utf-8"))) == read
