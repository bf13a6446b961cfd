"""What the build adds to the metadata: addresses, and a README whose links are absolute.

The repository's address stands in one place, `[tool.linattn] repository` in pyproject.toml. While it is empty the
metadata has no addresses, and the README keeps its relative links.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def with_absolute_links(text: str, repository: str, version: str) -> str:
    """Markdown with links to files of the repository at the tag of a version, and to the bytes of its pictures."""

    def absolute(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return LINK.sub(absolute, text)


def addresses(repository: str) -> dict[str, str]:
    """The [project.urls] of a repository."""
    return {"Homepage": repository, "Source": repository, "Issues": f"{repository}/issues",
            "Documentation": f"{repository}/blob/main/docs/index.md",
            "Changelog": f"{repository}/blob/main/CHANGELOG.md"}  # fmt: skip


def additions(root: Path) -> dict[str, Any]:
    """The fields of the metadata that pyproject.toml calls dynamic."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    repository, text = project["tool"]["linattn"]["repository"].rstrip("/"), (root / "README.md").read_text("utf-8")
    if repository:
        text = with_absolute_links(text, repository, project["project"]["version"])
    readme = {"readme": {"content-type": "text/markdown", "text": text}}
    return readme | ({"urls": addresses(repository)} if repository else {})


try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # the tests import this file without hatchling
    pass
else:

    class AddressesHook(MetadataHookInterface):
        """Called by hatchling."""

        def update(self, metadata: dict[str, Any]) -> None:
            metadata.update(additions(Path(self.root)))
