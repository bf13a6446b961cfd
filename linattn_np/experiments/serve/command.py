"""The command `linattn serve [FILE]`: a trained model answers requests over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys

from ...arguments import number
from ..generate import add_file, loaded
from .engine import Engine
from .http import Limits, Server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_file(parser)
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1: of this machine alone")
    number(parser, "--port", 0, default=8000, help="8000; 0 takes a free one")
    number(parser, "--slots", default=8, help="requests that are computed at the same time (8)")
    number(parser, "--waiting", default=32, help="requests that may wait; more get 503 (32)")
    number(parser, "--chunk", default=64, help="tokens of a prompt that are computed in one turn (64)")
    number(parser, "--cache", default=256, help="MiB of states of prompts that begin alike (256)")
    number(parser, "--drafts", 0, default=0, help="tokens that are looked up and verified in one call, at most (0)")
    number(parser, "--patience", default=30, help="seconds that a client may be silent (30)")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; the exit status."""
    try:
        about, model, params = loaded(args.file)
        engine = Engine(model.logits, params, slots=args.slots, waiting=args.waiting, chunk_size=args.chunk,
                        max_bytes=2**20 * args.cache, drafts=args.drafts)  # fmt: skip
        server = Server(engine, about["model"]["vocabulary"], Limits(patience=args.patience))
        asyncio.run(serve(engine, server, args.host, args.port))
    except (OSError, ValueError) as problem:
        sys.stderr.write(f"linattn serve: {problem}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


async def serve(engine: Engine, server: Server, host: str, port: int) -> None:
    """Answer clients until this is cancelled."""
    listening = await asyncio.start_server(server.client, host, port)
    at, own = listening.sockets[0].getsockname()[:2]
    sys.stderr.write(f"http://{at}:{own}/generate, {engine.slots} slots, {engine.pool.nbytes:,} bytes of states\n")
    sys.stderr.flush()
    computing = asyncio.ensure_future(engine.run())
    try:
        async with listening:
            await computing
    finally:
        computing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await computing
