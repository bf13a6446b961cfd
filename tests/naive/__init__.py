"""One loop per variant, token by token in float64, from its recurrence: the reference for every test.

Arrays are (B, T, H, K) and (B, T, H, V), per-token scalars (B, T, H), states (B, H, K, V).
v has one head per state. q and k may have fewer heads, each serving a group of states; q may have more, a group
of them reading one state. A file <folder>/<variant>.py has the function of its name; files are found by their names.
"""

from importlib import import_module
from pathlib import Path

FILES = sorted(Path(__file__).parent.glob("*/[a-z]*.py"))
NAIVE = {path.stem: getattr(import_module(f"{__name__}.{path.parent.name}.{path.stem}"), path.stem) for path in FILES}
