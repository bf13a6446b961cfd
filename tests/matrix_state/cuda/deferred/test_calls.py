"""One token with a change of variables on arrays that look like CuPy's: a kernel for each memory of the core."""

from __future__ import annotations

import array_api_compat
import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch, replay
from linattn_np.runtime.cuda import launch, nvrtc, record, sources
from linattn_np.runtime.cuda.compile import compile_source
from tests.cases import parts
from tests.matrix_state.cuda.step_twin import device_plans, stub
from tests.matrix_state.cuda.token import host as step_calls

launched, public = step_calls.launched, step_calls.public
B, H = 2, 4

OPTIONS = {
    "-": {}, "softplus": {"dt_softplus": True}, "raw": {"qk_l2norm": True, "A_log": True},
    "elu": {"feature_map": "elu+1"}, "mean": {"feature_map": "elu+1", "normalize": True},
    "steps": {"solver": "conjugate_gradients", "iterations": 3},
}  # fmt: skip
# a function, options, and how many kernels a repeated call launches with a new state and in place
TABLE = """
    hgrn2 - 1 1, longhorn - 1 1, efla - 1 1, gdn2 - 1 1,           mamba2 softplus 1 1,
    kda raw 1 1,        gated_delta_rule raw 1 1,    linear_attention elu 1 1, gsa - 2 2,            abc - 2 2,
    mlstm - 1 1,        linear_attention mean 1 1,   based - 1 1,              rebased - 1 1,        performer - 1 1,
    rfa - 1 1,          retention - 1 1,             gla - 1 1,                 mesa_net - 2 2,
    mesa_net steps 2 2, transxssm - 1 1, retnet - 1 1
"""
CALLS = {f"{name} {how}": (getattr(la, name), OPTIONS[how], (int(new), int(own)))
         for name, how, new, own in (row.split() for row in TABLE.split(","))}  # fmt: skip
WIDE = ("g", "beta", "A_log", "dt_bias", "A", "D", "dt", "i", "f", "s", "gv", "b")  # float32 beside 16-bit vectors


def drawn(fn, options, seed, D=8):
    """Arrays of one token by name, options, and a state, in NumPy."""
    rng = np.random.default_rng(seed)
    names = {*fn.spec.arrays, *fn.spec.options.defaults}
    K, V = 8 if names & {"order", "gamma"} else D, D  # products of channels are features

    def sample(T):
        optional = bool(names & {"D", "sigma"}) and "theta" not in names
        found = la.testing.sample(fn, rng, B=(B,), T=T, H=H, Hk=H, Hq=H, K=K, V=V, optional=optional)
        return {n: x.astype(np.float32) for n, x in found.items()}

    arrays, before = sample(1), sample(3)
    more = {n: x for n, x in options.items() if n != "A_log"}
    if "A_log" in options:
        bias = rng.uniform(0, 1, (H, K) if fn is la.kda else H)
        raw = {"A_log": rng.uniform(0, 1, H).astype(np.float32), "dt_bias": bias.astype(np.float32)}
        arrays, before = arrays | raw, before | raw
    return arrays, more, fn(**before, **more, return_state=True)[1]


def moved(x):
    return type(x)(*map(stub, x)) if isinstance(x, tuple) else stub(x)


@pytest.fixture
def fired(monkeypatch):
    """How many kernels each replayed call launches."""
    found, real = [], record.LaunchSequence.run

    def run(self, pointers):
        found.append(len(self._launches))
        return real(self, pointers)

    monkeypatch.setattr(record.LaunchSequence, "run", run)
    return found


def called(fn, arrays, more, state, how):
    """(out, parts of the state, parts of the state given)."""
    mine, own = {n: stub(x) for n, x in arrays.items()}, moved(state)
    given = more | {"state": own, "return_state": True} | ({"overwrite_state": True} if how == "in place" else {})
    if how == "step":
        mine = {n: stub(x[:, 0]) if x.ndim > 2 and x.shape[:2] == (B, 1) else x for n, x in mine.items()}
        out, end = la.step(fn, **mine, **given)
        return out[:, None], parts(end), parts(own)
    out, end = fn(**mine, **given)
    return out, parts(end), parts(own)


@pytest.mark.parametrize("how", ["new", "in place", "step"])
@pytest.mark.parametrize("name", CALLS)
def test_repeated_calls_are_their_launches(public, monkeypatch, fired, name, how):
    """NumPy's results, the same bits from a first call and from a replayed one, in so many launches."""
    fn, options, count = CALLS[name]
    for seed in range(2):
        arrays, more, state = drawn(fn, options, seed)
        expected = fn(**arrays, **more, state=state, return_state=True)
        bits = []
        for again in (False, True):
            if not again:
                replay.clear()
            with monkeypatch.context() as nothing_planned:
                if again:
                    nothing_planned.setattr(dispatch, "prepare", None)
                out, end, own = called(fn, arrays, more, state, how)
            for x, y in zip([out, *end], [expected[0], *parts(expected[1])], strict=True):
                assert x.shape == y.shape
                assert np.abs(x - y).max() <= 1e-5 * max(1, np.abs(y).max())
            if how == "in place":
                assert all(x is y for x, y in zip(end, own, strict=True))
            bits.append([np.asarray(x).tobytes() for x in (out, *end)])
        assert bits[0] == bits[1]
        assert len(device_plans()) == 1
    assert set(fired) == {count[how == "in place"]}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_of_16_bits(public, fired, name):
    """An output that is only rounded is rounded by the core's kernel."""
    fn, options, (count, _) = CALLS[name]
    arrays, more, state = drawn(fn, options, 0)
    arrays = {n: x if n in WIDE else x.astype(ml_dtypes.bfloat16) for n, x in arrays.items()}
    expected, end = fn(**{n: x.astype(np.float32) for n, x in arrays.items()}, **more, state=state, return_state=True)
    for _ in range(2):
        out, last, _ = called(fn, arrays, more, state, "new")
        assert out.dtype == ml_dtypes.bfloat16
        for x, y in zip([out, *last], [expected, *parts(end)], strict=True):
            assert np.abs(x.astype(np.float32) - y).max() <= 2**-6 * np.abs(y).max()
    assert fired == [count + (fn is la.mesa_net)]  # which rounds what its solver reads


@pytest.mark.parametrize("name", CALLS)
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(public, name):
    fn, options, _ = CALLS[name]
    arrays, more, state = drawn(fn, options, 0)
    out, end, _ = called(fn, arrays, more, state, "new")
    one = {n: x[:1] if x.shape[:2] == (B, 1) else x for n, x in arrays.items()}
    first = type(state)(*(S[:1] for S in state)) if isinstance(state, tuple) else state[:1]
    alone, end_alone, _ = called(fn, one, more, first, "new")
    for x, y in zip([out, *end], [alone, *end_alone], strict=True):
        assert np.array_equal(x[:1], y)


def test_what_cannot_be_deferred_is_computed_in_full_on_the_state_as_it_was(public):
    """A map that computes a running sum, which a kernel of rows does not."""

    def running(x):
        return array_api_compat.array_namespace(x).cumulative_sum(x, axis=-1)

    arrays, _, state = drawn(la.linear_attention, {}, 0)
    more = {"feature_map": (running, lambda x, d: d)}
    expected = la.linear_attention(**arrays, **more, state=state, return_state=True)
    out, end, own = called(la.linear_attention, arrays, more, state, "in place")
    assert np.abs(out - expected[0]).max() < 1e-5
    assert end[0] is own[0]
    assert np.abs(end[0] - expected[1]).max() < 1e-5


@pytest.mark.parametrize("name", ["kda raw", "mlstm -", "transxssm -"])
def test_kernels_compile(public, monkeypatch, name):
    """For both architectures, without spills, of heads of 128 channels in 16 bits."""
    if not nvrtc.available():
        pytest.skip("no NVRTC")
    launched, real = {}, launch.launch

    def launching(file, entry, constants, *more):
        launched[file] = dict(constants)
        real(file, entry, constants, *more)

    monkeypatch.setattr(launch, "launch", launching)
    fn, options, _ = CALLS[name]
    arrays, more, state = drawn(fn, options, 0, 128)
    called(fn, {n: x if n in WIDE else x.astype(ml_dtypes.bfloat16) for n, x in arrays.items()}, more, state, "new")
    around = [file for file in launched if file.startswith("step_calls/")]
    assert len(around) == 1
    for file in launched:
        for arch in ("sm_80", "sm_90a"):
            log = compile_source(sources.installed(file), launched[file], arch, cached=False).log
            assert "0 bytes spill stores" in log, log


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_16_bits_on_a_gpu(cp, name):
    """Against NumPy in float64."""
    fn, options, _ = CALLS[name]
    arrays, more, state = drawn(fn, options, 0, 128)
    arrays = {n: x if n in WIDE else x.astype(ml_dtypes.bfloat16) for n, x in arrays.items()}
    own = lambda S, how: type(S)(*map(how, S)) if isinstance(S, tuple) else how(S)  # noqa: E731
    expected, end = fn(
        **{n: x.astype(np.float64) for n, x in arrays.items()},
        **more,
        return_state=True,
        state=own(state, lambda S: S.astype(np.float64)),
    )
    there, before = {n: cp.asarray(x) for n, x in arrays.items()}, own(state, cp.asarray)
    replay.clear()
    for _ in range(2):
        out, last = fn(**there, **more, state=before, return_state=True)
        for x, y in zip([out, *parts(last)], [expected, *parts(end)], strict=True):
            assert np.abs(x.get().astype(np.float64) - y).max() <= 2**-6 * np.abs(y).max()


@pytest.mark.gpu
@pytest.mark.parametrize("D", [8, 128])
@pytest.mark.parametrize("name", CALLS)
def test_on_a_gpu(cp, name, D):
    """Against NumPy in float64; the same bits from a first call, a replayed one, in place, and alone."""
    fn, options, _ = CALLS[name]
    arrays, more, state = drawn(fn, options, 0, D)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    own = lambda S, how: type(S)(*map(how, S)) if isinstance(S, tuple) else how(S)  # noqa: E731
    expected, end = fn(**wide, **more, state=own(state, lambda S: S.astype(np.float64)), return_state=True)
    there, before = {n: cp.asarray(x) for n, x in arrays.items()}, own(state, cp.asarray)
    replay.clear()
    found = [fn(**there, **more, state=before, return_state=True) for _ in range(2)]
    found.append(fn(**there, **more, state=own(before, cp.copy), return_state=True, overwrite_state=True))
    first = {n: x[:1] if x.shape[:2] == (B, 1) else x for n, x in there.items()}
    alone, end_alone = fn(**first, **more, state=own(before, lambda S: S[:1]), return_state=True)
    each = [[out.get(), *(S.get() for S in parts(last))] for out, last in found]
    for x, y in zip(each[0], [expected, *parts(end)], strict=True):
        assert np.abs(x - y).max() <= 1e-5 * max(1, np.abs(y).max())
    for x, *others, y in zip(*each, [alone.get(), *(S.get() for S in parts(end_alone))], strict=True):
        assert all(x.tobytes() == z.tobytes() for z in others)
        assert np.array_equal(x[:1], y)
