"""The server: clients who leave, stall or are wrong; the others have the bits of a server of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import urllib.parse

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.__main__ import main
from linattn_np.experiments.serve import drafts
from linattn_np.experiments.serve.engine import Ask, Engine, Failed, Full
from linattn_np.experiments.serve.http import LIMITS, Limits, Server
from linattn_np.experiments.serve.pool import Pool

C, POISON = 8, 255  # tokens of a chunk; a token whose embedding is NaN
SYSTEM = tuple(range(40, 61))  # what many prompts begin with


def model(*mixers, layers=2, dtype=np.float32):
    found = la.layers.language_model(256, D=24, layers=layers, mixers=list(mixers), heads=3)
    params = found.logits.init(np.random.default_rng(0), dtype)
    params["embedding/weight"][POISON] = np.nan
    params["head/weight"][:, POISON] = params["head/weight"][:, POISON - 1]  # argmax takes the first
    return found.logits, params


@contextlib.asynccontextmanager
async def running(logits, params, **options):
    engine = Engine(logits, params, **{"chunk_size": C} | options)
    computing = asyncio.ensure_future(engine.run())
    try:
        yield engine
    finally:
        computing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await computing


@contextlib.asynccontextmanager
async def listening(logits, params, limits=LIMITS, **options):
    async with running(logits, params, **options) as engine:
        server = await asyncio.start_server(Server(engine, 256, limits).client, "127.0.0.1", 0)
        async with server:
            yield engine, server.sockets[0].getsockname()


async def settled(engine):
    """Wait until nothing is computed."""
    async with asyncio.timeout(20):
        while engine.active or engine.waiting:
            await asyncio.sleep(0.001)
    assert sorted(engine.free) == list(range(engine.slots))
    engine.store.clear()
    assert len(engine.store) == engine.store.nbytes == 0  # no state is leased


async def alone(logits, params, asks):
    """The tokens of requests, one after the other, each of a new server without stored states."""
    found = []
    for ask in asks:
        async with running(logits, params, slots=1) as engine:
            found.append([token async for token in engine.submit(ask)])
    return found


async def request(at, body, path="/generate", method="POST", patience=30):
    """(status, lines of JSON)."""
    async with asyncio.timeout(patience):
        reader, writer = await asyncio.open_connection(*at)
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        writer.write(f"{method} {path} HTTP/1.1\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        rest = (await reader.read()).decode()
        writer.close()
    lines = rest.split("\r\n")[1::2] if "chunked" in head else rest.splitlines()
    return int(head.split()[1]), [json.loads(line) for line in lines if line]


def asks(count):
    """Requests of all lengths, half of which begin alike; every fourth prompt is shorter than a chunk."""
    rng = np.random.default_rng(3)
    longest = [C, 30, 30, 30] * count
    drawn = [tuple(rng.integers(0, POISON, rng.integers(1, longest[n])).tolist()) for n in range(count)]
    return [Ask(SYSTEM * (n % 2) + x, int(rng.integers(1, 12)), (0.0, 0.9)[n % 3 > 0], n) for n, x in enumerate(drawn)]


POOLED = ("gated_delta_rule", "mamba3", "log_linear_gla", "mlstm", "rwkv7", "scan", "selective_scan", "titans_linear")


BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize("mixer", POOLED)
def test_requests_together_have_the_tokens_that_they_have_alone(mixer, dtype):
    logits, params = model(mixer, layers=1, dtype=dtype)
    given = asks(7)

    async def together():
        async with running(logits, params, slots=3) as engine:
            streams = [engine.submit(ask) for ask in given]
            found = await asyncio.gather(*(tokens_of(s) for s in streams))
            assert engine.store.hits > 0
            await settled(engine)
            return found

    async def tokens_of(stream):
        return [token async for token in stream]

    async def both():
        return await together(), await alone(logits, params, given)

    one, other = asyncio.run(both())
    assert one == other
    short = [n for n, ask in enumerate(given) if len(ask.prompt) <= C]
    assert short
    for n in short:  # one chunk: the prefill of la.train.generate
        ask = given[n]
        assert one[n] == list(la.train.generate(logits, params, ask.prompt, ask.count, ask.temperature, ask.seed))


@pytest.mark.parametrize("mixer", [fn.__name__ for fn in la.VARIANTS])
def test_states_of_a_pool_are_those_of_sequences_alone(mixer):
    """Rows in any order and at different lengths; a model whose states grow is refused."""
    logits, params = model(mixer, layers=1)
    _, state = logits(params, np.zeros((1, 5), np.int64), return_state=True)
    if getattr(la, mixer).spec.grows:
        with pytest.raises(ValueError, match="grows with the tokens, expected a model without softmax attention"):
            Pool(logits, params, 3)
        return
    pool, ids = Pool(logits, params, 4), np.random.default_rng(1).integers(0, POISON, (3, 7))
    lengths, rows, wanted = (5, 2, 5), (2, 0, 3), {}
    for row, x, T in zip(rows, ids, lengths, strict=True):
        _, state = logits(params, x[None, :T], return_state=True)
        pool.put([row], state)
        wanted[row] = la.step(logits, params, x[T : T + 1], state=state, return_state=True)
    packed = pool.packed(3)
    seen = []
    for group in pool.together(rows):
        last = np.array([ids[rows.index(n)][lengths[rows.index(n)]] for n in group])
        found = la.step(logits, params, last, state=pool.take(group), return_state=True)
        pool.put(group, found.state)
        seen += group
        for n, row in enumerate(group):
            assert np.array_equal(found.out[n], wanted[row].out[0])
    assert sorted(seen) == sorted(rows)
    again = Pool(logits, params, 1)
    for row in rows:
        again.put([0], wanted[row].state)
        assert all(map(np.array_equal, pool.packed(row), again.packed(0)))
    pool.unpack(1, packed)
    assert all(map(np.array_equal, pool.packed(1), packed))


def test_a_draft_is_what_followed_the_last_three_tokens_where_they_were_last():
    past = drafts.Past([1, 2, 3, 4, 5, 1, 2, 3, 6, 1, 2])
    assert past.draft(9) == []
    past.add(3)
    assert past.draft(9) == [6, 1, 2, 3]
    assert past.draft(2) == [6, 1]
    assert past.draft(0) == past.draft(-1) == drafts.Past([1]).draft(3) == []


@pytest.mark.parametrize("mixer", ["gated_delta_rule", "rwkv7", "scan", "mamba2"])
def test_drafts_change_no_token(monkeypatch, mixer):
    """Drafts of which a part is right, beside requests that have none."""
    logits, params = model(mixer, layers=1)
    params["embedding/weight"][POISON] = 1  # it may be drawn
    rng = np.random.default_rng(8)
    given = [Ask(tuple(rng.integers(0, POISON, 5 + n).tolist()), 12, (0.0, 0.9)[n % 2], n) for n in range(4)]
    wanted = asyncio.run(alone(logits, params, given))
    answers = {ask.prompt: tokens for ask, tokens in zip(given, wanted, strict=True)}

    class Known(drafts.Past):
        def draft(self, most):
            for prompt, answer in answers.items():
                if tuple(self._tokens[: len(prompt)]) == prompt and rng.random() < 0.8:
                    at = len(self._tokens) - len(prompt)
                    return [t if rng.random() < 0.7 else 3 for t in answer[at : at + max(most, 0)]]
            return []

    monkeypatch.setattr(drafts, "Past", Known)

    async def tokens_of(stream):
        return [token async for token in stream]

    async def drafted():
        async with running(logits, params, slots=3, drafts=4, backlog=7) as engine:
            found = await asyncio.gather(*(tokens_of(engine.submit(ask)) for ask in given))
            await settled(engine)
            return found, engine.drafted, engine.accepted

    found, count, right = asyncio.run(drafted())
    assert 0 < right < count
    assert found == wanted


@pytest.mark.parametrize("mixer", ["mamba3", "mlstm"])
def test_models_whose_calls_have_bits_of_their_own_take_no_drafts(mixer):
    logits, params = model(mixer, layers=1)
    with pytest.raises(ValueError, match="tokens in one call have other bits than single ones, expected no drafts"):
        Engine(logits, params, drafts=4)
    Engine(logits, params)


def test_a_draft_that_fails_fails_nobody(monkeypatch):
    """The model raises for calls of several tokens: the sequence is computed without drafts."""
    logits, params = model("gla", layers=1)
    given = Ask((1, 2, 3), 6, 0.0)
    wanted = asyncio.run(alone(logits, params, [given]))[0]
    monkeypatch.setattr(drafts.Past, "draft", lambda past, most: [5] * most)

    class Raises:
        init, parameters, step = logits.init, logits.parameters, logits.step
        failed = None

        def __call__(self, params, ids, **options):
            if self.failed is not None and ids.shape[1] > 1 and options.get("state") is not None:
                self.failed += 1
                raise MemoryError("too much")
            return logits(params, ids, **options)

    raises = Raises()

    async def drafted():
        async with running(raises, params, drafts=4) as engine:
            raises.failed = 0
            found = [token async for token in engine.submit(given)]
            await settled(engine)
            return found

    assert asyncio.run(drafted()) == wanted
    assert raises.failed


def test_clients_who_leave_fail_or_are_wrong_do_not_touch_the_others():
    logits, params = model("gated_delta_rule", "mamba2")
    given = asks(12)

    async def leaves(at, ask, lines):
        """A client who goes after some lines."""
        reader, writer = await asyncio.open_connection(*at)
        body = json.dumps({"prompt": ask.prompt, "count": 4000}).encode()
        writer.write(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        for _ in range(lines):
            await reader.readline()
        writer.close()

    wrong = (b"{", b"[]", b"", {"prompt": ""}, {"prompt": [256]}, {"prompt": "a", "n": 1}, {"prompt": "a", "count": 0},
             {"prompt": "a", "temperature": -1.0}, {"prompt": "a", "seed": True}, {"prompt": [True]})  # fmt: skip

    async def all_of_them():
        async with listening(logits, params, slots=3, waiting=100) as (engine, at):
            each = [("right", request(at, dataclasses.asdict(a))) for a in given]
            each += [("left", leaves(at, a, n)) for n, a in enumerate(given[:6])]
            each += [("failing", request(at, {"prompt": x, "count": 1})) for x in ([1, 2, POISON, 3], [POISON])]
            each += [("wrong", request(at, body)) for body in wrong]
            order = np.random.default_rng(5).permutation(len(each))
            found = await asyncio.gather(*(each[n][1] for n in order))
            await settled(engine)
            _, (status,) = await request(at, b"", "/status", "GET")
        assert (status["free"], status["waiting"]) == (3, 0)
        by_number = dict(zip(order.tolist(), found, strict=True))
        return {kind: [by_number[n] for n, (k, _) in enumerate(each) if k == kind] for kind, _ in each}

    async def both():
        return await all_of_them(), await alone(logits, params, given)

    found, wanted = asyncio.run(both())
    for (status, lines), tokens, ask in zip(found["right"], wanted, given, strict=True):
        assert status == 200
        assert [line["token"] for line in lines[:-1]] == tokens
        assert lines[-1] == {"done": True, "prompt": len(ask.prompt), "count": ask.count}
    assert found["failing"] == [(500, [{"error": "FloatingPointError: logits are not finite"}])] * 2
    assert [status for status, _ in found["wrong"]] == [400] * len(wrong)


def test_a_call_that_fails_fails_for_those_alone_who_are_to_blame():
    """One sequence of a batch makes the model raise, after its first token."""
    logits, params = model("gla", layers=1)

    class Raises:
        init, parameters = logits.init, logits.parameters
        step = None

        def __call__(self, params, ids, **options):
            if ids.shape[1] == 1 and options.get("state") is not None and (ids == forbidden).any():
                raise MemoryError("too much")
            return logits(params, ids, **options)

    given = [Ask(tuple(range(n, n + 9)), 6, 0.0) for n in range(5)]
    wanted = asyncio.run(alone(logits, params, given))
    forbidden = wanted[2][2]
    raises = Raises()
    raises.step = lambda arrays, keywords: _step(raises, *arrays, **keywords)

    async def tokens_of(stream):
        found = []
        try:
            async for token in stream:
                found.append(token)
        except Failed as problem:
            found.append(str(problem))
        return found

    async def together():
        async with running(raises, params, slots=5) as engine:
            found = await asyncio.gather(*(tokens_of(engine.submit(ask)) for ask in given))
            await settled(engine)
            return found

    for found, whole in zip(asyncio.run(together()), wanted, strict=True):
        stop = whole.index(forbidden) + 1 if forbidden in whole[:-1] else None
        assert found == (whole if stop is None else [*whole[:stop], "MemoryError: too much"])


def _step(layer, params, ids, **options):
    found = layer(params, ids[:, None], **options)
    return type(found)(found.out[:, 0], found.state)


def test_a_full_server_refuses_and_a_slow_reader_waits_alone():
    logits, params = model("gla", layers=1)

    async def runs():
        wait = "1 requests wait, expected fewer than 1"
        async with listening(logits, params, slots=2, waiting=1, backlog=3) as (engine, at):
            slow = engine.submit(Ask((1, 2), 50, 0.0))
            assert len([t async for t in engine.submit(Ask((3,), 40, 0.0))]) == 40
            assert slow.left == 47  # three tokens wait for their reader, no more are drawn
            second = engine.submit(Ask((4,), 1000, 0.0))
            async with asyncio.timeout(20):
                while engine.waiting or engine.free:
                    await asyncio.sleep(0.001)
            third = engine.submit(Ask((5,), 2, 0.0))
            with pytest.raises(Full, match=wait):
                engine.submit(Ask((6,), 1))
            status, (answer,) = await request(at, {"prompt": "a"})
            assert (status, answer) == (503, {"error": wait})
            second.close()
            assert len([t async for t in third]) == 2
            assert len([t async for t in slow]) == 50
            await settled(engine)

    asyncio.run(runs())


def test_silent_clients_and_long_requests_are_sent_away():
    logits, params = model("gla", layers=1)

    async def runs():
        limits = Limits(prompt=20, count=9, body=200, patience=0.2)
        async with listening(logits, params, limits) as (engine, at):
            reader, writer = await asyncio.open_connection(*at)
            writer.write(b"POST /generate HTTP/1.1\r\n")
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
            assert (await request(at, {"prompt": [1] * 21}))[0] == 413
            assert (await request(at, {"prompt": [1] * 100}))[0] == 413  # of the body
            assert (await request(at, {"prompt": [1], "count": 10}))[0] == 400
            assert (await request(at, b"", "/elsewhere"))[0] == 404
            await settled(engine)

    asyncio.run(runs())


def test_the_command_refuses_a_file_that_is_no_run_and_a_model_whose_states_grow(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("linattn serve: ")
    assert main(["serve", str(trained(tmp_path, "softmax_attention"))]) == 2
    assert "grows with the tokens" in capsys.readouterr().err


def trained(tmp_path, mixer, dtype=np.float32):
    """A run before its first step."""
    settings = {"optimiser": "adamw", "decay": 0.1}
    about = {"model": {"vocabulary": 256, "D": 24, "layers": 1, "heads": 3, "mixers": [mixer]}, "settings": settings}
    path = tmp_path / f"{mixer}.safetensors"
    loss = la.layers.language_model(**about["model"]).loss
    la.train.Run.start(loss, la.train.AdamW(), about=about, dtype=dtype).save(path)
    return path


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
def test_the_command_serves_the_tokens_that_generate_writes(tmp_path, capsys, dtype):
    path = trained(tmp_path, "gated_delta_rule", dtype)
    given = {"prompt": "the é", "count": 9, "seed": 4}
    command = [sys.executable, "-m", "linattn_np", "serve", str(path), "--port", "0"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:  # with a handler's default
        signal.signal(signal.SIGINT, before)
        try:
            at = urllib.parse.urlsplit(server.stderr.readline().split("/generate")[0])
            status, lines = asyncio.run(request((at.hostname, at.port), given))
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 130
        finally:
            server.kill()
    assert status == 200
    assert main(["generate", str(path), "--prompt", given["prompt"], "--count", "9", "--seed", "4"]) == 0
    written = capsys.readouterr().out
    assert written.startswith(given["prompt"] + "".join(line["text"] for line in lines[:-1]))
