"""`lightning-decentral lobby --port 29400 --workers 2:16`: where elastic workers meet.

    --new-key run.key                 makes a run's key, to be copied to all machines, and ends
    --workers 2:16 --key run.key      lets in only workers with this key; all messages are encrypted

    started        listening at port 29400 for 2 to 16 workers
    waiting        waiting at host0:29400 for 2 workers, 1 is here
    a new view     view 3: 4 workers from round 120; joined: host2:711; lost: host1:93 (connection ended)

Short: the server is `elastic/wire/lobby_server.py`. It may be killed and started again while the workers train."""

import argparse

from lightning_decentral.cli.console import number, whole
from lightning_decentral.elastic.plan.view import Bounds, Times
from lightning_decentral.elastic.wire.lobby_server import serve
from lightning_decentral.elastic.wire.sockets.keys import KEY, key_of, new_key


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=whole, default=29400)
    parser.add_argument("--address", default="", help="address to listen at (default: all interfaces)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workers", type=bounds, help="minimum and maximum number of workers, MIN:MAX: 2:16")
    what.add_argument(
        "--new-key", metavar="FILE", help="make a key, by which workers and lobby know each other, and end"
    )
    parser.add_argument("--key", default="", metavar="FILE", help=f"only workers with this key are let in ({KEY})")
    parser.add_argument(
        "--dead-after", type=number, default=10.0, help="seconds of silence after which a worker counts as dead"
    )
    parser.set_defaults(run=run)


def bounds(text: str) -> Bounds:
    """Parse LEAST:MOST on the command line. ArgumentTypeError for anything else."""
    least, _, most = text.partition(":")
    try:
        return Bounds(int(least), int(most))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be LEAST:MOST such as 2:16, got {text!r}") from error


def run(options: argparse.Namespace) -> None:
    if not 0 <= options.port < 65536:
        raise ValueError(f"--port must be from 0 to 65535, got {options.port}: give --port 29400")
    if options.new_key:
        new_key(options.new_key)
        print(f"{options.new_key}: copy it to each machine by a secret way, as whoever has it is a member")
        return
    found, times, key = options.workers, Times(options.dead_after), key_of(options.key)

    def ready(port: int) -> None:
        whom = f"{found.least} to {found.most} workers{' with the key' if key else ''}"
        print(f"listening at port {port} for {whom}", flush=True)

    serve(found, times, options.address or "0.0.0.0", options.port, ready, key)
