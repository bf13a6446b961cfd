"""Pictures of built pages in a browser, and what does not fit: python make_screenshots.py SITE OUT [PAGE ...].

For each page and width it writes OUT/PAGE-WIDTH.png and prints formulas that were not rendered, pictures that were not
loaded, the number of pixels by which the page is wider than the window, and blocks whose own contents are wider (these
scroll by themselves). Needs chromium; all pages, 1280 and 400 pixels wide, without PAGE.
"""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WIDTHS = {1280: 900, 400: 800}  # width: height of a picture
LOOK = """JSON.stringify({
  errors: document.querySelectorAll('.katex-error').length,
  raw: [...document.querySelectorAll('.arithmatex')].filter(e => !e.querySelector('.katex')).length,
  pictures: [...document.images].filter(e => !e.naturalWidth).length,
  beyond: document.documentElement.scrollWidth - innerWidth,
  scroll: [...document.querySelectorAll('.md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset .arithmatex')]
    .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map(e => (e.querySelector('table') ? 'table' :
      e.tagName == 'CODE' ? 'code' : 'formula') + ' ' + e.scrollWidth + ' in ' + e.clientWidth),
})"""


class Browser:
    """A headless Chromium, spoken to through pipes."""

    def __init__(self) -> None:
        to_browser, self.write = os.pipe()
        self.read, from_browser = os.pipe()
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   "--remote-debugging-pipe", f"--user-data-dir={tempfile.mkdtemp()}", "about:blank"]  # fmt: skip
        script = f"exec 3<&{to_browser} 4>&{from_browser}; exec " + " ".join(command)
        self.process = subprocess.Popen(["bash", "-c", script], pass_fds=(to_browser, from_browser),
                                        stderr=subprocess.DEVNULL)  # fmt: skip
        self.count, self.rest, self.session = 0, b"", ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def ask(self, method: str, **params: Any) -> Any:
        """The result of one command."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                self.rest += os.read(self.read, 1 << 20)
            one, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(one)
            if answer.get("id") == self.count:
                return answer["result"]

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression)["result"].get("value")

    def show(self, url: str, width: int, height: int) -> dict[str, Any]:
        """Load a page; what LOOK finds in it."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=url)
        for _ in range(100):
            time.sleep(0.1)
            if self.value("document.readyState") == "complete":
                break
        time.sleep(0.4)  # formulas
        return json.loads(self.value(LOOK))


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and writes no log."""

    def log_message(self, *_: Any) -> None: ...


def served(site: Path) -> str:
    """The address of a server of the site, which lasts as long as this process."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def main() -> int:
    """0 if every page fits and every formula is rendered."""
    site, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    pages = sys.argv[3:] or sorted(str(p.relative_to(site)) for p in site.rglob("*.html") if p.name != "404.html")
    out.mkdir(parents=True, exist_ok=True)
    browser, address, wrong = Browser(), served(site), 0
    for page in pages:
        path, _, part = page.partition("#")
        for width, height in WIDTHS.items():
            found = browser.show(f"{address}/{path}" + (f"#{part}" if part else ""), width, height)
            fault = found["errors"] or found["raw"] or found["pictures"] or found["beyond"] > 0
            wrong += bool(fault)
            scroll = f"; scroll: {', '.join(found['scroll'])}" if found["scroll"] else ""
            sys.stdout.write(
                f"{page} {width}: formulas wrong {found['errors']}, raw {found['raw']}, pictures missing "
                f"{found['pictures']}, beyond {found['beyond']}{scroll}\n"
            )
            shot = browser.ask("Page.captureScreenshot", format="png")["data"]
            name = path.removesuffix(".html").replace("/", "-") + (f"-{part}" if part else "")
            (out / f"{name}-{width}.png").write_bytes(base64.b64decode(shot))
    browser.process.terminate()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
