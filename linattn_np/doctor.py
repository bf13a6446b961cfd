"""The command `linattn doctor`: versions, devices, backends, caches, and exactness of every variant and piece."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .call.explain import explain
from .call.vjp import vjp
from .catalog import VARIANTS
from .nn.declaration import BACKENDS as OF_PIECES
from .nn.declaration import PIECES
from .nn.samples import options_of
from .nn.samples import sample as sample_of_piece
from .runtime import code_cache
from .runtime.versions import versions
from .testing import check_vjp, relative_error, sample, sample_state

FORWARD, GRADIENT = 1e-12, 1e-7  # float64: against the definition, against central differences


def devices() -> dict[str, str]:
    """The CPU, and the CUDA devices that CuPy can use."""
    devices = {"cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} logical cores"}
    cupy = _cupy()
    if cupy is None:
        devices["cuda"] = "none (no CuPy, or no device that it can use)"
        return devices
    for n in range(cupy.cuda.runtime.getDeviceCount()):
        about = cupy.cuda.runtime.getDeviceProperties(n)
        devices[f"cuda:{n}"] = f"{about['name'].decode()}, compute capability {about['major']}.{about['minor']}"
    return devices


def backends() -> dict[str, str]:
    """The backends of a call on NumPy arrays: the default with its reason, and why the others are not the default."""
    fn = VARIANTS[0]
    explanation = explain(fn, **sample(fn, np.random.default_rng(0)))
    return {explanation.backend: explanation.reason, **explanation.others}


def _cupy() -> Any:
    """CuPy, if it can be imported and sees a device."""
    if importlib.util.find_spec("cupy") is None:
        return None
    try:
        import cupy

        return cupy if cupy.is_available() else None
    except Exception:
        return None


def cache_folders() -> dict[str, str]:
    """The folders of compiled code."""
    from .runtime.cuda import nvrtc

    home = os.path.expanduser("~")
    return {
        "numba": code_cache.folder_in_words("cpu"),
        "cuda": code_cache.folder_in_words(nvrtc.KIND),
        "cupy": os.environ.get("CUPY_CACHE_DIR", os.path.join(home, ".cupy", "kernel_cache")),
    }


class Check(NamedTuple):
    """One variant with options on one backend: the largest errors of its outputs and of its gradients."""

    variant: str
    backend: str
    forward: float | None  # None: the backend is the definition
    gradient: float
    options: str = ""  # name=value, those that differ from the defaults

    @property
    def right(self) -> bool:
        return (self.forward or 0.0) <= FORWARD and self.gradient <= GRADIENT


def checks() -> Iterator[Check]:
    """Every variant and option set on every backend that supports it, in float64, with states and state cotangents."""
    cupy = _cupy()
    for fn in VARIANTS:
        for options in fn.samples.options:
            arrays = _draw(fn, options)
            definition = fn(**arrays, **options, return_state=True, backend="reference")
            for name in fn.spec.core.BACKENDS:
                try:
                    explain(fn, **arrays, **options, backend=name)
                except ValueError:
                    continue  # the backend does not support this call
                yield _on_cpu(fn, arrays, {**options, "backend": name}, definition)
            if cupy is not None:
                yield _on_gpu(fn, arrays, options, definition, cupy)
    for name, piece in PIECES.items():
        for options in options_of(name):
            given = sample_of_piece(name, np.random.default_rng(0), options)
            definition = piece.function(**given, **options, backend="reference")
            for backend in OF_PIECES:
                if explain(piece.function, **given, **options, backend=backend).backend == backend:
                    yield _piece_on_cpu(piece.function, given, {**options, "backend": backend}, definition)


def _draw(fn: Callable[..., Any], options: Any, T: int = 37) -> dict[str, Any]:
    """Random arrays of a call with an initial state."""
    rng = np.random.default_rng(0)
    arrays = sample(fn, rng, T=T, H=2, K=5, V=3)
    return arrays | {"state": sample_state(fn, rng, (2,), options)}


def _parts(result: Any) -> list[Any]:
    return [y for x in result for y in (_parts(x) if isinstance(x, tuple) else [x]) if y is not None]


def _on_cpu(fn: Callable[..., Any], arrays: dict[str, Any], options: dict[str, Any], definition: Any) -> Check:
    forward = None
    if options["backend"] != "reference":
        result = fn(**arrays, **options, return_state=True)
        forward = max(map(relative_error, _parts(result), _parts(definition)))
    gradient = max(check_vjp(fn, **arrays, **options, rtol=np.inf).values())
    backend = options.pop("backend")
    return Check(fn.__name__, backend, forward, gradient, _named(options))


def _piece_on_cpu(fn: Callable[..., Any], given: dict[str, Any], options: dict[str, Any], definition: Any) -> Check:
    forward = None
    if options["backend"] != "reference":
        forward = max(map(relative_error, _parts((fn(**given, **options),)), _parts((definition,))))
    gradient = max(check_vjp(fn, **given, **options, rtol=np.inf).values(), default=0.0)
    backend = options.pop("backend")
    return Check(f"nn.{fn.__name__}", backend, forward, gradient, _named(options))


def _on_gpu(fn: Callable[..., Any], arrays: dict[str, Any], options: Any, definition: Any, cupy: Any) -> Check:
    """CuPy against the definition on NumPy; its pullback against that of NumPy, which is checked separately."""
    move = lambda x: type(x)(*map(cupy.asarray, x)) if isinstance(x, tuple) else cupy.asarray(x)  # noqa: E731
    moved = {name: move(x) for name, x in arrays.items()}
    result, pullback = vjp(fn, **moved, **options, return_state=True)
    here, here_pullback = vjp(fn, **arrays, **options, return_state=True)
    out, state = here
    forward = max(map(relative_error, _parts(result), _parts(definition)))
    backend = explain(fn, **moved, **options).backend
    moved = pullback(move(out), move(state) if isinstance(state, tuple) else cupy.asarray(state))
    gradient = max(map(relative_error, _parts(moved), _parts(here_pullback(out, state))))
    return Check(fn.__name__, f"cupy {backend}", forward, gradient, _named(options))


def _named(options: Any) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--brief", action="store_true", help="one line per backend and a verdict")


def run(args: argparse.Namespace) -> int:
    """Print the installed versions and the checks; 0 if all checks pass."""
    return brief() if args.brief else everything()


def brief() -> int:
    """One line per backend, a verdict, the exit status."""
    write = sys.stdout.write
    by_backend: dict[str, list[Check]] = {}
    sys.stderr.write(f"doctor: {len(VARIANTS)} variants, {len(PIECES)} pieces of layers\n")
    for check in checks():
        by_backend.setdefault(check.backend, []).append(check)
    wrong = 0
    for backend, done in by_backend.items():
        failed = sorted({check.variant for check in done if not check.right})
        wrong += sum(not check.right for check in done)
        forward = max((check.forward for check in done if check.forward is not None), default=None)
        errors = "" if forward is None else f"outputs within {forward:.1e}, "
        verdict = f"WRONG: {', '.join(failed)}" if failed else "right"
        write(
            f"{backend:12s} {len(done)} checks of {len({check.variant for check in done})} functions, {errors}"
            f"gradients within {max(check.gradient for check in done):.1e}: {verdict}\n"
        )
    if _cupy() is None:
        write(f"{'cupy':12s} not checked: {devices()['cuda']}\n")
    write(_verdict(sum(map(len, by_backend.values())), wrong) + "\n")
    return 1 if wrong else 0


def _verdict(count: int, wrong: int) -> str:
    package = versions()
    about = f"linattn_np {package.get('linattn_np', '')}, Python {package['python']}, NumPy {np.__version__}"
    return f"{about}: {count} checks, {f'{wrong} WRONG' if wrong else 'all right'}"


def everything() -> int:
    """Versions, devices, cache folders, a row per check, and the exit status."""
    write = sys.stdout.write
    sections = {"versions": versions(), "devices": devices(), "backends": backends(), "caches": cache_folders()}
    for title, rows in sections.items():
        write(f"{title}\n")
        for name, text in rows.items():
            write(f"  {name:18s} {text}\n")
    write(
        f"exactness in float64 (forward against the definition <= {FORWARD:g}, "
        f"gradients against central differences <= {GRADIENT:g}); last column: options\n"
    )
    done = []
    for check in checks():
        done.append(check)
        verdict = "right" if check.right else "WRONG"
        forward = "defines" if check.forward is None else f"{check.forward:.1e}"
        row = f"  {check.variant:20s} {check.backend:12s} {forward:>8s} {check.gradient:8.1e}  {verdict}"
        write(f"{row}  {check.options or 'defaults'}\n")
    wrong = [check for check in done if not check.right]
    ran = ", ".join(sorted({check.backend for check in done}))
    write(f"{len(done)} checks on {ran}: {'all right' if not wrong else f'{len(wrong)} WRONG'}\n")
    return 1 if wrong else 0
