"""The example of the page on several machines, on four devices of JAX."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "distributed.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="an installed package has no pages")
def test_spans_over_the_devices_of_jax():
    pytest.importorskip("jax")
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-c", code + "\nassert mesh.size == 4"]
    done = subprocess.run(command, env=os.environ | flags | path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
