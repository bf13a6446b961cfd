"""Pages, docstrings, comments and messages use the field's words."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if p.is_file()]
SOURCES = sorted((ROOT / "linattn_np").rglob("*.py"))
CUDA = sorted(p for p in (ROOT / "cuda_src").rglob("*") if p.suffix in (".cu", ".cuh", ".md"))
HAYSTACK = "needles.py"  # text that memories read
WORDS = {  # a private word: the field's
    r"rooms?": "core", r"likeness(es)?": "signature", r"made again": "replayed", r"unasked": "by default",
    r"askew": "misaligned", r"dear|costly": "expensive", r"the other way round": "transposed",
    r"written down": "recorded", r"lie askew": "are misaligned", r"carr(y|ies) out": "execute",
    r"byte-?codes?|op-?codes?": "no interpreter is left", r"hand-made": "hand-derived",
    r"house": "package", r"cards?": "device, or spec", r"dearer|costlier": "more expensive", r"carry_out": "execute",
    r"walk(s|ed|ing)?": "traversal",
    r"products_done|early_query|early_read": "reads_previous_state, or a fence by its name",
}  # fmt: skip
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def prose_of(path: Path) -> str:
    """A page without its code; the comments and strings of a module; all of a CUDA source."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return FENCE.sub("", text)
    if path.suffix != ".py":
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(t.string for t in tokens if t.type in (tokenize.COMMENT, tokenize.STRING))


@pytest.mark.parametrize("path", [*PAGES, *SOURCES, *CUDA], ids=lambda p: str(p.relative_to(ROOT)))
def test_words(path):
    if path.name == HAYSTACK:
        return
    text = prose_of(path)
    for word, better in WORDS.items():
        found = re.search(rf"\b({word})\b", text, re.IGNORECASE)
        assert found is None, f"{found[0]!r}: say {better!r}"


VARIABLE = re.compile(r"\bLINATTN_[A-Z_]+[A-Z]\b")


def test_environment_variables_share_a_prefix_and_are_on_one_page():
    """Those that the package reads: LINATTN_ and a name; install.md has a row of each."""
    read = {name for path in SOURCES for name in VARIABLE.findall(path.read_text("utf-8"))}
    assert "LINATTN_CACHE_DIR" in read
    assert not [name for name in read if name.startswith("LINATTN_NP_")]
    if PAGES:
        page = (ROOT / "docs" / "install.md").read_text("utf-8")
        assert set(VARIABLE.findall(page)) == read
