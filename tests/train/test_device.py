"""Training on CuPy arrays: the numbers of NumPy's runs, graphs, one wait a step; emulated here, or on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la
from linattn_np.layers.parts import short_conv
from linattn_np.train import step as steps_of
from linattn_np.train.flat import on_host
from tests.cuda.emulation import device, emulated, public  # noqa: F401

from . import device as stubs
from .device import cupy  # noqa: F401

MODEL = la.layers.language_model(16, D=16, layers=1, mixers=[lambda c: short_conv(c.D)], mlp="squared_relu", hidden=24)
DATA = la.train.Tokens([np.tile([1, 5, 2, 9, 3], 60)])
OPTIMISERS = {"adamw": la.train.AdamW(), "muon": la.train.Muon()}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
optimisers = pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def fit(run, steps, **options):
    options = {"rate": la.train.cosine(1e-2, 20), "bar": False} | options
    return la.train.fit(MODEL.loss, run, options.pop("batch", DATA.batches(3, 12)), steps, **options)


def start(dtype=np.float32, optimiser=OPTIMISERS["adamw"]):
    return la.train.Run.start(MODEL.loss, optimiser, dtype=dtype)


def bits(run):
    return [on_host(x.vector).tobytes() for x in (run.params, *run.moments.values())]


@dtypes
@optimisers
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_run_is_that_of_numpy(cupy, optimiser, dtype, accumulate):  # noqa: F811
    expected = fit(start(dtype, optimiser), 4, accumulate=accumulate)
    run = fit(start(dtype, optimiser).to("cuda"), 4, accumulate=accumulate)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=(4 if dtype != np.float32 else 64) * eps)
    own, other = (on_host(x.moments.get("master", x.params).vector) for x in (run, expected))
    assert on_host(run.params.vector).tobytes() == own.astype(dtype).tobytes()
    # the first step of Adam is a sign: a small gradient may have another one; Muon lifts small singular values, which
    # are those of what is rounded: of the gradients of logits on the way from 16 bits
    bound = 1e-2 * 1e-2 + eps * 0.01
    if dtype != np.float32 and isinstance(optimiser, la.train.Muon):
        bound += 8 * eps * np.abs(other - on_host(start(dtype, optimiser).params.vector)).mean()
    assert np.abs(own - other).mean() < bound
    assert (run.step, run.position) == (4, 4 * accumulate)


@dtypes
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(cupy, dtype, accumulate, tmp_path):  # noqa: F811
    """From its file, on a device and moved there: what is captured computes what the calls do."""
    path, whole = tmp_path / "run", fit(start(dtype).to("cuda"), 5, accumulate=accumulate)
    fit(start(dtype).to("cuda"), 2, accumulate=accumulate, save=path)
    resumed = fit(la.train.Run.load(path).to("cuda"), 5, accumulate=accumulate)
    assert resumed.losses == whole.losses
    assert bits(resumed) == bits(whole) == bits(whole.to("cpu"))
    assert type(whole.params.vector) is np.ndarray


def test_each_shape_has_a_graph_from_its_second_step_on(cupy, monkeypatch):  # noqa: F811
    if cupy.launched is None:
        pytest.skip("graphs are counted by the stub")
    stubs.graphs_made.clear()
    calls, real = [], steps_of.Task.gradient
    monkeypatch.setattr(
        steps_of.Task, "gradient", lambda self, *given: calls.append(given[0].shape) or real(self, *given)
    )
    short, long = DATA.batches(2, 5), DATA.batches(3, 12)
    fit(start().to("cuda"), 6, batch=lambda n: (short if n % 2 else long)(n))
    assert len(stubs.graphs_made) == 2
    assert len(calls) == 2 + 2 + 4  # computed, captured, launched again by the stub


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_is_not_finite_ends_the_run(cupy, accumulate):  # noqa: F811
    run = fit(start().to("cuda"), 2, accumulate=accumulate)
    run.params.arrays["norm/weight"][0] = np.nan
    before = bits(run)
    with pytest.raises(FloatingPointError, match="fit: the gradient of step 2 is not finite, its loss nan"):
        fit(run, 9, accumulate=accumulate)
    assert bits(run) == before
    assert (run.step, len(run.losses)) == (2, 2)


def test_a_step_that_cannot_be_captured_is_computed_by_calls(cupy, monkeypatch):  # noqa: F811
    def fails(self, inputs):
        raise NotImplementedError("a product of CuPy")

    from linattn_np.runtime.cuda.graphs import Graphs

    expected = fit(start().to("cuda"), 3)
    monkeypatch.setattr(Graphs, "_captured", fails)
    with pytest.warns(UserWarning, match="fit: a step is not one CUDA graph: NotImplementedError: a product of CuPy"):
        run = fit(start().to("cuda"), 3)
    assert bits(run) == bits(expected)


def test_gradients_are_clipped_on_the_device(cupy):  # noqa: F811
    runs = [fit(start().to("cuda"), 1, clip=clip) for clip in (1e-3, 1e9)]
    sizes = [np.linalg.norm(on_host(run.moments["m"].vector)) for run in runs]
    assert np.isclose(sizes[0], 1e-3 * (1 - 0.9), rtol=1e-4)
    assert sizes[1] > 10 * sizes[0]


def test_kernels_and_cublas_compute_a_step(cupy):  # noqa: F811
    if cupy.launched is None:
        pytest.skip("launches are counted by the stub")
    fit(start(ml_dtypes.bfloat16, OPTIMISERS["muon"]).to("cuda"), 1)
    entries = [entry for file, entry, *_ in cupy.launched if file == "ops/optimiser.cu"]
    assert entries == ["squares", "scaled", "adamw"]
    of_layers, of_a_matrix = 3 * 3, 5 * 3  # up, down, head; Muon's: two steps of them in each of 5 turns and one more
    assert cupy.blas.calls.count("product") == of_layers + 2 * of_a_matrix


def test_a_model_on_a_device_continues_its_text(cupy):  # noqa: F811
    here, there = fit(start(), 30), fit(start(), 30).to("cuda")
    texts = [
        list(la.train.generate(MODEL.logits, run.params.arrays, [1, 5, 2], 6, temperature=0)) for run in (here, there)
    ]
    assert texts[0] == texts[1] == [9, 3, 1, 5, 2, 9]


@optimisers
def test_a_step_of_the_optimiser_alone_is_that_of_numpy(cupy, optimiser):  # noqa: F811
    rng = np.random.default_rng(0)
    here, there = start(optimiser=optimiser), start(optimiser=optimiser).to("cuda")
    for t in (1, 2):
        g = rng.standard_normal(here.params.vector.size).astype(np.float32)
        for run in (here, there):
            own = g if run is here else cupy.bring(g)
            optimiser.update(run.params, run.params.like(own), run.moments, t, 0.01, clip=0.3)
    np.testing.assert_allclose(on_host(there.params.vector), here.params.vector, rtol=1e-4, atol=1e-6)


class Alone:
    """Two ranks in one process, one after the other: what the other gave is what this one gives."""

    rank, size = 0, 2

    def all_gather(self, x):
        return x[None].repeat(2, axis=0)


def test_ranks_add_the_gradients_of_their_graphs(cupy):  # noqa: F811
    """Both ranks have the same batches: the step is that of one rank which reads them once."""
    batch = DATA.batches(3, 12)
    one = fit(start().to("cuda"), 3, batch=lambda n: batch(0))
    run = fit(start().to("cuda"), 3, batch=lambda n: batch(0), accumulate=2, comm=Alone())
    assert run.losses == one.losses
    assert bits(run) == bits(one)
