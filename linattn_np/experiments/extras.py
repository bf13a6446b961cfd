"""The packages that experiments need beside the library's own dependencies."""

from __future__ import annotations

import importlib


def require(*names: str, without_pictures: str = "") -> None:
    """Raise ModuleNotFoundError with the pip command if a package cannot be imported.

    `without_pictures` is the option of a command that can do without matplotlib.
    """
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        hint = f", or {without_pictures}" if without_pictures and missing == ["matplotlib"] else ""
        raise ModuleNotFoundError(f"{', '.join(missing)} not installed: pip install 'linattn_np[lab]'{hint}")
