"""Check a built site: python docs/check_site.py FOLDER.   No page, style or script loads anything from elsewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

LOADED = re.compile(r"""<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc\s*=\s*["']?(?:https?:)?//|"""
                    r"""<link\b[^>]*\bhref\s*=\s*["']?(?:https?:)?//[^>]*|"""
                    r"""url\(\s*["']?(?:https?:)?//|@import\s+["'](?:https?:)?//""")  # fmt: skip
CANONICAL = re.compile(r"""rel\s*=\s*["']?canonical""")  # names the page, loads nothing


def main() -> int:
    """0 if the site is complete in itself."""
    folder = Path(sys.argv[1])
    pages = sorted(folder.rglob("*.html"))
    wrong = [
        f"{path.relative_to(folder)}: {found[0][:120]}"
        for path in (*pages, *folder.rglob("*.css"))
        for found in LOADED.finditer(path.read_text("utf-8"))
        if not CANONICAL.search(found[0])
    ]
    wrong += [
        f"{path.relative_to(folder)} has formulas and no KaTeX"
        for path in pages
        if 'class="arithmatex"' in (text := path.read_text("utf-8")) and "katex.min.js" not in text
    ]
    sys.stdout.write("\n".join([*wrong, f"{len(pages)} pages, {len(wrong)} faults", ""]))
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
