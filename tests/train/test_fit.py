"""Training: losses fall, resumed runs have the same bits, interrupted ones are saved."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.runtime.cuda import launch

T, B = 12, 3
MODEL = la.layers.language_model(16, D=16, layers=2, mixers=["gated_delta_rule", "gla"], heads=2, hidden=20)
DATA = la.train.Tokens([np.tile([1, 5, 2, 9, 3], 60)])
OPTIMISERS = {"adamw": la.train.AdamW(), "muon": la.train.Muon()}


def fit(run, steps, **options):
    options = {"rate": la.train.cosine(1e-2, 20), "bar": False, "accumulate": 2} | options
    return la.train.fit(MODEL.loss, run, DATA.batches(B, T), steps, **options)


DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(optimiser, dtype, tmp_path):
    path = tmp_path / "run"
    whole = fit(la.train.Run.start(MODEL.loss, optimiser, dtype=dtype), 6)
    fit(la.train.Run.start(MODEL.loss, optimiser, dtype=dtype), 2, save=path)
    assert whole.params.vector.dtype == dtype
    assert ("master" in whole.moments) == (dtype != np.float32)
    resumed = fit(la.train.Run.load(path, optimiser), 6)
    assert resumed.losses == whole.losses
    assert resumed.position == whole.position == 12
    assert resumed.params.vector.tobytes() == whole.params.vector.tobytes()
    assert list(resumed.params.arrays) == list(whole.params.arrays)
    for kind, moment in whole.moments.items():
        assert resumed.moments[kind].vector.tobytes() == moment.vector.tobytes()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))], ids=["copy", "pickle"])
@pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)
def test_a_copied_run_has_the_bits_of_an_uncopied_one(optimiser, copied):
    """Its arrays are views of its own vectors, which the optimiser writes to."""
    run = fit(la.train.Run.start(MODEL.loss, optimiser), 2)
    other = copied(run)
    for one in (other.params, *other.moments.values()):
        assert all(np.shares_memory(x, one.vector) for x in one.arrays.values())
        assert not np.shares_memory(one.vector, run.params.vector)
    assert fit(other, 5).losses == fit(run, 5).losses
    assert other.params.vector.tobytes() == run.params.vector.tobytes()


@pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_losses_fall(dtype, optimiser):
    losses = fit(la.train.Run.start(MODEL.loss, optimiser, dtype=dtype), 20, accumulate=1).losses
    assert losses[0] > 2.5
    assert losses[-1] < 1.2


def test_accumulated_batches_are_one_large_batch():
    few, many = (la.train.Run.start(MODEL.loss) for _ in range(2))
    fit(few, 1)
    batch = DATA.batches(B, T)
    both = tuple(map(np.concatenate, zip(batch(0), batch(1), strict=True)))
    la.train.fit(MODEL.loss, many, lambda n: both, 1, la.train.cosine(1e-2, 20), bar=False)
    assert np.allclose(few.losses, many.losses, rtol=1e-6)
    assert np.allclose(few.moments["m"].vector, many.moments["m"].vector, rtol=1e-4, atol=1e-7)


def test_an_interrupted_run_is_saved(tmp_path):
    def batch(n):
        if n == 6:
            raise KeyboardInterrupt
        return DATA.batches(B, T)(n)

    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        la.train.fit(
            MODEL.loss, la.train.Run.start(MODEL.loss), batch, 9, la.train.constant(1e-2), save=path, bar=False
        )
    assert la.train.Run.load(path).step == 6


class Interrupted(la.train.AdamW):
    """ctrl-C comes while the optimiser works."""

    def update(self, *given, **options):
        os.kill(os.getpid(), signal.SIGINT)
        super().update(*given, **options)


def test_ctrl_c_waits_for_the_end_of_a_step(tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(la.train.Run.start(MODEL.loss, Interrupted()), 9, save=path)
    saved, whole = la.train.Run.load(path), fit(la.train.Run.start(MODEL.loss), 1)
    assert (saved.step, saved.position) == (1, 2)
    assert saved.params.vector.tobytes() == whole.params.vector.tobytes()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_collector_of_garbage_is_as_before():
    """Objects that were there before are not searched during training; afterwards they are."""
    gc.unfreeze()  # of the collected tests
    frozen = []

    def batch(n):
        frozen.append(gc.get_freeze_count())
        return DATA.batches(B, T)(n)

    la.train.fit(MODEL.loss, la.train.Run.start(MODEL.loss), batch, 1, la.train.constant(1e-3), bar=False)
    assert frozen[0] > 0
    assert gc.get_freeze_count() == 0


def test_a_gradient_that_is_not_finite_ends_the_run():
    run = la.train.Run.start(MODEL.loss)
    run.params.arrays["norm/weight"][0] = np.nan
    before = run.params.vector.copy()
    with pytest.raises(FloatingPointError, match="fit: the gradient of step 0 is not finite"):
        fit(run, 1)
    assert run.params.vector.tobytes() == before.tobytes()


def test_a_step_smaller_than_half_a_unit_in_the_last_place_is_not_lost():
    """Parameters in bfloat16 follow their masters: steps of 1e-5 add up."""
    run = la.train.Run.start(MODEL.loss, dtype=ml_dtypes.bfloat16)
    before, master = run.params.vector.copy(), run.moments["master"].vector.copy()
    fit(run, 1, rate=la.train.constant(1e-5))
    assert (run.moments["master"].vector != master).mean() > 0.9
    assert (run.params.vector != before).mean() < 0.2
    fit(run, 40, rate=la.train.constant(1e-5))
    assert (run.params.vector != before).mean() > 0.2


@pytest.mark.parametrize("device", ["gpu", None])
def test_a_device_that_is_none_is_an_error(device):
    with pytest.raises(ValueError, match=r"Run.to: device is .*, expected 'cpu' or 'cuda'"):
        la.train.Run.start(MODEL.loss).to(device)


def test_without_cupy_or_a_device_the_error_says_so(monkeypatch):
    run = la.train.Run.start(MODEL.loss)

    def missing():
        raise ImportError

    monkeypatch.setattr(launch, "cupy", missing)
    with pytest.raises(ModuleNotFoundError, match="CuPy, whose arrays lie on a GPU, is not installed"):
        run.to("cuda")

    def fails():
        raise RuntimeError("no driver")

    for count, message in ((fails, "CuPy finds no CUDA device: no driver"), (lambda: 0, "CuPy finds no CUDA device")):
        cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=count))
        monkeypatch.setattr(launch, "cupy", lambda cuda=cuda: SimpleNamespace(cuda=cuda))
        with pytest.raises(RuntimeError, match=message):
            run.to("cuda")
    assert run.to("cpu") is run


def test_gradients_are_clipped():
    runs = [fit(la.train.Run.start(MODEL.loss), 1, clip=clip) for clip in (1e-3, 1e9)]
    sizes = [np.linalg.norm(run.moments["m"].vector) for run in runs]
    assert np.isclose(sizes[0], 1e-3 * (1 - 0.9), rtol=1e-4)
    assert sizes[1] > 10 * sizes[0]


def test_files_of_other_kinds_are_named(tmp_path):
    la.train.save(tmp_path / "x", {"a": np.zeros(3)})
    with pytest.raises(ValueError, match="x holds no run of training"):
        la.train.Run.load(tmp_path / "x")
    la.train.Run.start(MODEL.loss, la.train.Muon()).save(tmp_path / "y")
    with pytest.raises(ValueError, match=r"y has moments 'v' of \d+ arrays, expected \d+: the optimiser is AdamW"):
        la.train.Run.load(tmp_path / "y")


def test_schedules():
    rate = la.train.cosine(2.0, 100, warmup=0.1, last=0.5)
    assert np.allclose([rate(0), rate(4), rate(9), rate(10), rate(55), rate(100), rate(900)],
                       [0.2, 1.0, 2.0, 2.0, 1.25, 0.5, 0.5])  # fmt: skip
    assert la.train.constant(0.3)(7) == 0.3
    with pytest.raises(ValueError, match=r"cosine: warmup is 1\.5"):
        la.train.cosine(1.0, 10, warmup=1.5)


def test_a_trained_model_continues_its_text():
    run = fit(la.train.Run.start(MODEL.loss), 40, accumulate=1, rate=la.train.cosine(1e-2, 40))

    def draw(**how):
        return list(la.train.generate(MODEL.logits, run.params.arrays, [1, 5, 2, 9, 3, 1, 5], 6, **how))

    assert draw(temperature=0) == [2, 9, 3, 1, 5, 2]
    assert draw(seed=3) == draw(seed=3)
    with pytest.raises(ValueError, match="generate: prompt is empty"):
        list(la.train.generate(MODEL.logits, run.params.arrays, [], 1))
    with pytest.raises(ValueError, match="generate: temperature is -1"):
        list(la.train.generate(MODEL.logits, run.params.arrays, [1], 1, temperature=-1))


def test_a_curve_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    la.train.picture(tmp_path / "one.png", [3.0, 2.0, 1.0])
    la.train.picture(tmp_path / "two.png", {"a": [3.0], "b": []})
    assert all((tmp_path / n).read_bytes()[:4] == b"\x89PNG" for n in ("one.png", "two.png"))


def test_losses_in_a_line_fall_from_the_highest_bar_to_the_lowest():
    assert la.train.in_a_line([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == "█▇▆▅▄▃▂▁"
    assert la.train.in_a_line([3.0, 1.0, 1.0, 1.0, 2.0, 0.0], width=3) == "█▁▁"
    assert la.train.in_a_line([2.0]) == "▁"
    with pytest.raises(ValueError, match="in_a_line: losses is empty"):
        la.train.in_a_line([])
