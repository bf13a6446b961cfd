"""Gradients on a GPU after kept ones that differ in one thing: what a first call gives (test_replay.py)."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from tests.cases import parts
from tests.matrix_state.cuda.step_twin import recorded_plans, stub
from tests.matrix_state.cuda.test_replay import H, K, drawn, misaligned
from tests.matrix_state.cuda.token import host as step_calls

launched, public, doubling = step_calls.launched, step_calls.public, step_calls.doubling


def pull_of(x, state, dout, dstate, **options):
    """(out, gradients), as bytes."""
    result, pull = la.vjp(la.gated_delta_rule, **x, state=state, **options)
    return [None if y is None else (y.shape, y.dtype, y.tobytes()) for y in (*parts(result), *pull(dout, dstate))]


def forward_of(keywords):
    """The recorded forward of a call that is replayed together with its pullback."""
    found = replay.by_key.get(replay.vjp_key(replay.signature_of(la.gated_delta_rule.spec, (), keywords)))
    return found if found is not None and found.replayable else None


def cotangents(seed, T=2):
    rng = np.random.default_rng(seed + 50)
    return tuple(stub(rng.standard_normal(s).astype(np.float32)) for s in ((2, T, H, K), (2, H, K, K)))


def check_pull(monkeypatch, first, then):
    """then, a call and its pullback, after first twice, is what it is where nothing is kept."""
    replay.clear()
    expected = pull_of(*then[0], **then[1])
    replay.clear()
    for _ in range(2):
        pull_of(*first[0], **first[1])
    for _ in range(2):
        assert pull_of(*then[0], **then[1]) == expected


COTANGENTS = {
    "no dout": lambda dout, dstate: (None, dstate),
    "no dstate": lambda dout, dstate: (dout, None),
    "dout in 16 bits": lambda dout, dstate: (stub(np.asarray(dout.astype(np.float16))), dstate),
    "dout misaligned": lambda dout, dstate: (misaligned(dout), dstate),
    "dstate misaligned": lambda dout, dstate: (dout, misaligned(dstate, 8)),
    "dout turned": lambda dout, dstate: (stub(np.asarray(dout).swapaxes(1, 2).copy()).swapaxes(1, 2), dstate),
    "dstate turned": lambda dout, dstate: (dout, stub(np.asarray(dstate).swapaxes(2, 3).copy()).swapaxes(2, 3)),
    "one array": lambda dout, dstate: (dout, dout),
}


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("kind", COTANGENTS)
def test_other_cotangents(public, monkeypatch, kind, turn):
    doubling(monkeypatch)
    T = H if kind == "one array" else 2
    (x, S), (y, R) = (drawn(n, T, K=K, V=K) for n in (0, 1)) if T == 2 else (drawn(n, T, 4, 4) for n in (0, 1))
    sizes = (2, T, H, x["v"].shape[-1]), tuple(S.shape)
    rng = np.random.default_rng(3)
    plain, other = (tuple(stub(rng.standard_normal(s).astype(np.float32)) for s in sizes) for _ in range(2))
    calls = ((x, S, *plain), {}), ((y, R, *COTANGENTS[kind](*other)), {})
    check_pull(monkeypatch, *(reversed(calls) if turn else calls))


@pytest.mark.parametrize("names", [("q", "k"), ("k", "v"), ("q", "k", "v")], ids="-".join)
@pytest.mark.parametrize("turn", [False, True])
def test_gradients_of_one_array_given_twice(public, monkeypatch, names, turn):
    doubling(monkeypatch)
    (x, S), (y, R) = drawn(0), drawn(1)
    calls = ((x, S, *cotangents(0)), {}), ((y | dict.fromkeys(names, y[names[0]]), R, *cotangents(1)), {})
    check_pull(monkeypatch, *(reversed(calls) if turn else calls))


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("turn", [False, True])
def test_a_cotangent_that_is_an_input(public, monkeypatch, name, turn):
    """dout may be any array of its shape: v itself, as in a loss of squares."""
    doubling(monkeypatch)
    (x, S), (y, R) = drawn(0), drawn(1)
    if y[name].shape != y["v"].shape:
        y[name] = stub(np.asarray(y[name]))
        dout = cotangents(1)[0]
    else:
        dout = y[name]
    calls = ((x, S, *cotangents(0)), {}), ((y, R, dout, cotangents(1)[1]), {})
    check_pull(monkeypatch, *(reversed(calls) if turn else calls))
    calls = ((x, S, *cotangents(0)), {}), ((y, R, cotangents(1)[0], R), {})  # and dstate the state
    check_pull(monkeypatch, *(reversed(calls) if turn else calls))


@pytest.mark.parametrize("more", [{"scale": 3.0}, {"return_state": True}, {"chunk_size": 1}], ids=str)
@pytest.mark.parametrize("turn", [False, True])
def test_another_option_of_gradients(public, monkeypatch, more, turn):
    doubling(monkeypatch)
    (x, S), (y, R) = drawn(0), drawn(1)
    calls = ((x, S, *cotangents(0)), {}), ((y, R, *cotangents(1)), more)
    check_pull(monkeypatch, *(reversed(calls) if turn else calls))


@pytest.mark.parametrize("first", ["time_first", "heads_first"])
def test_the_other_layout_of_gradients(public, monkeypatch, first):
    """As many tokens as heads."""
    doubling(monkeypatch)
    (x, S), (y, R) = drawn(0, T=H), drawn(1, T=H)
    other = {"time_first": "heads_first", "heads_first": "time_first"}[first]
    calls = ((x, S, *cotangents(0, H)), {"layout": first}), ((y, R, *cotangents(1, H)), {"layout": other})
    check_pull(monkeypatch, *calls)
    check_pull(monkeypatch, calls[1], calls[1])


def test_gradients_and_plain_calls_are_kept_apart(public, monkeypatch):
    doubling(monkeypatch)
    x, S = drawn(0)
    for _ in range(2):
        pull_of(x, S, *cotangents(0))
        out = la.gated_delta_rule(**x, state=S)
    assert len(recorded_plans()) == 2
    assert np.abs(out - la.gated_delta_rule(**{n: np.array(y) for n, y in x.items()}, state=np.array(S))).max() < 1e-5


def test_how_much_a_forward_may_keep_is_part_of_what_it_is_found_by(public, monkeypatch):
    """A forward that kept blocks is not replayed where none may be kept."""
    doubling(monkeypatch)
    x, S = drawn(0)
    for n, value in enumerate((1, 0, 1)):
        monkeypatch.setattr(la.config, "cuda_saved_mib", value)
        pull_of(x, S, *cotangents(n))
        assert len(recorded_plans()) == min(n + 1, 2)
        assert forward_of(x | {"state": S}) is not None
    monkeypatch.setattr(la.config, "cuda_saved_mib", 2)
    assert forward_of(x | {"state": S}) is None


@pytest.mark.parametrize(("name", "value"), [("cuda_saved_mib", 0), ("training_bits", True)])
def test_a_changed_setting_plans_anew(public, monkeypatch, name, value):
    """Plain calls and gradients: the plans of both depend on the settings."""
    doubling(monkeypatch)
    x, S = drawn(0)
    for count in (2, 4):
        pull_of(x, S, *cotangents(0))
        la.gated_delta_rule(**x, state=S)
        assert len(recorded_plans()) == count
        monkeypatch.setattr(la.config, name, value)


def test_a_pullback_reads_its_own_call(public, monkeypatch):
    """Two calls alike, pulled back in the other order and twice."""
    doubling(monkeypatch)
    sets = [(*drawn(n), *cotangents(n)) for n in range(3)]
    right = [pull_of(*one) for one in sets]
    pulls = [la.vjp(la.gated_delta_rule, **x, state=S)[1] for x, S, _, _ in sets]
    for n in (2, 0, 1, 0):
        found = pulls[n](*sets[n][2:])
        assert [None if y is None else (y.shape, y.dtype, y.tobytes()) for y in found] == right[n][1:]


@pytest.mark.parametrize("alias", ["dout", "dstate"])
def test_one_array_given_twice_does_not_keep_others_from_being_repeated(public, monkeypatch, alias):
    """A cotangent that is an input too is recorded as a copy."""
    doubling(monkeypatch)
    (x, S), (dout, dstate) = drawn(0), cotangents(0)
    pull_of(x, S, x["v"] if alias == "dout" else dout, S if alias == "dstate" else dstate)
    assert forward_of(x | {"state": S}).replayable
    pull_of(x, S, dout, dstate)
    pull_of(x, S, dout, dstate)
    assert forward_of(x | {"state": S}) is not None


def test_cotangents_whose_dtype_alone_differs(public, monkeypatch):
    doubling(monkeypatch)
    (x, S), (y, R) = drawn(0), drawn(1)
    dout, dstate = cotangents(0)
    wide = stub(np.zeros((*dout.shape[:-1], 2 * K), np.float16))
    other = wide[..., ::2]
    other[...] = dout
    assert other.strides == dout.strides
    check_pull(monkeypatch, ((x, S, dout, dstate), {}), ((y, R, other, dstate), {}))
