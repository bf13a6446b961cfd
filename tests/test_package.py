"""What is published: metadata that the build makes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "hatch_build.py").is_file(), reason="an installed package")


@pytest.fixture
def build():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_published_readme_has_absolute_links(build):
    text = build.with_absolute_links((ROOT / "README.md").read_text("utf-8"), "https://host/owner/name", "1.2")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)
    assert "](https://host/owner/name/raw/v1.2/docs/pictures/compare.png)" in text
    assert "](https://host/owner/name/blob/v1.2/docs/quick_start.md)" in text
    given = "[a](https://b/c) [d](#e) ![f](g.png)"
    assert build.with_absolute_links(given, "https://h", "1") == "[a](https://b/c) [d](#e) ![f](https://h/raw/v1/g.png)"


def test_addresses_come_from_one_place(build, tmp_path):
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (tmp_path / "README.md").write_text("[x](docs/x.md)")
    line = re.compile(r'^repository = "[^"]*"', re.MULTILINE)
    assert len(line.findall(project)) == 1
    (tmp_path / "pyproject.toml").write_text(line.sub('repository = ""', project))
    assert build.additions(tmp_path) == {"readme": {"content-type": "text/markdown", "text": "[x](docs/x.md)"}}
    (tmp_path / "pyproject.toml").write_text(line.sub('repository = "https://host/name/"', project))
    found = build.additions(tmp_path)
    assert found["urls"]["Source"] == "https://host/name"
    assert found["readme"]["text"].startswith("[x](https://host/name/blob/v")


def test_every_python_of_the_classifiers_may_install_it():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    least = re.search(r'^requires-python = ">=(3\.\d+)"', project, re.MULTILINE)
    assert least is not None
    assert versions[0] == least[1]
    assert versions == [f"3.{n}" for n in range(11, 11 + len(versions))]
