"""Lists on a command line: with commas, with blanks, or both."""

from __future__ import annotations

import argparse
from typing import Any


def several(parser: argparse.ArgumentParser, option: str, kind: type, **about: Any) -> None:
    """An option that takes one value or more: --option 1,2,3 or --option 1 2 3."""

    def values(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(",") if part)

    values.__name__ = kind.__name__  # in argparse's messages
    parser.add_argument(option, type=values, nargs="+", action=_Flat, metavar=about.pop("metavar", "N"), **about)


class _Flat(argparse.Action):
    """All parts in one tuple."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(x for part in values for x in part))
