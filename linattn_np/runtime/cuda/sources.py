"""Finds cuda_src, in a checkout or in a wheel, and reads a file with everything it includes.

"arguments/package/Name.cuh" is generated from the Struct with that path in package/cuda/arguments.py.
"""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import import_module
from pathlib import Path

from .structs import Struct

PACKAGE = Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
GENERATED = re.compile(r"arguments/((\w+)/\w+)\.cuh")
Files = dict[str, tuple[str, list[str]]]  # by name: the text and its includes
Source = tuple[str, str, dict[str, str]]  # name and text of a .cu file, its headers by include name


def root() -> Path:
    """The folder cuda_src: inside the package in a wheel, beside it in a checkout.

    Raises FileNotFoundError if it is in neither place.
    """
    for folder in (PACKAGE / "cuda_src", PACKAGE.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"cuda_src is neither in {PACKAGE} nor beside it")


def read(name: str, folder: Path | None = None, known: Files | None = None) -> Source:
    """The source `name` and every header it includes, directly or not. Include names are relative to cuda_src.

    known: files of the folder that were read before; updated.
    """
    folder = root() if folder is None else folder
    return of_text(name, (folder / name).read_text(encoding="utf-8"), folder, known)


def of_text(name: str, text: str, folder: Path | None = None, known: Files | None = None) -> Source:
    """A source from its text, with the headers of `folder`."""
    folder, known, headers = root() if folder is None else folder, {} if known is None else known, {}
    pending = INCLUDE.findall(text)
    while pending:
        header = pending.pop()
        if header not in headers:
            if header not in known:
                content = generated(header) or (folder / header).read_text(encoding="utf-8")
                known[header] = content, INCLUDE.findall(content)
            headers[header], included = known[header]
            pending += included
    return name, text, headers


def generated(header: str) -> str | None:
    """The text of a header of arguments; None for other names.   Raises KeyError if there is no such struct."""
    if (name := GENERATED.fullmatch(header)) is None:
        return None
    declared = vars(import_module(f"linattn_np.{name[2]}.cuda.arguments")).values()
    return {x.path: x for x in declared if isinstance(x, Struct)}[name[1]].header()


_headers: Files = {}


@functools.cache
def installed(name: str) -> Source:
    """`read(name)`, reading each file once per process."""
    return read(name, known=_headers)


def digest(name: str, text: str, headers: dict[str, str]) -> str:
    """Hash of names and texts, each preceded by its length, so that the encoding is unambiguous."""
    h = hashlib.sha256()
    for part in [name, text, *(x for item in sorted(headers.items()) for x in item)]:
        data = part.encode()
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()
