"""How long a message between two stages takes: sent there and back over the step's own channel, halved.

seconds(tokens) = latency + tokens * token_seconds       the line through a short slice and a whole sequence
"""

import statistics
import time
from collections.abc import Callable

import torch

from lightning_decentral.pipeline.channel import Channel
from lightning_decentral.pipeline.executor import Clock
from lightning_decentral.pipeline.models import Call
from lightning_decentral.pipeline.pipe import Pipe
from lightning_decentral.pipeline.profile import Link, through
from lightning_decentral.pipeline.schedule import Action, Kind

TIMES = 7
SHORT = 16


def ping(pipe: Pipe, call: Call) -> Link:
    """Between this stage and the next, one pair of stages after the other; zeros behind the last one. Collective."""
    length, link = pipe.model.length(call), Link()
    for stage in range(pipe.size - 1):
        if pipe.rank in (stage, stage + 1):
            found = [(tokens, _one_way(pipe, call, tokens, stage)) for tokens in (max(1, length // SHORT), length)]
            link = through(*found) if pipe.rank == stage else link
    return link


def _one_way(pipe: Pipe, call: Call, tokens: int, stage: int) -> float:
    """Half the median time there and back, without the first one; on the next stage a number without meaning."""
    channel, now = pipe.channel(pipe.empty(call, (tokens,))), clock(call.inputs.device)
    known = pipe.model.shape(call, 0, tokens)
    assert known is not None
    message = torch.ones(known[0], dtype=known[1], device=call.inputs.device)
    speak = _call if pipe.rank == stage else _answer
    times = [_timed(lambda: speak(channel, pipe.rank, message), now) for _ in range(TIMES + 1)]
    return statistics.median(times[1:]) / 2


def _timed(work: Callable[[], None], now: Clock) -> float:
    begin = now()
    work()
    return now() - begin


def _call(channel: Channel, stage: int, message: torch.Tensor) -> None:
    channel.expect(back := Action(Kind.BACKWARD, stage, 0, 0))
    channel.send(Action(Kind.FORWARD, stage, 0, 0), message)
    channel.receive(back)


def _answer(channel: Channel, stage: int, message: torch.Tensor) -> None:
    channel.expect(there := Action(Kind.FORWARD, stage, 0, 0))
    channel.receive(there)
    channel.send(Action(Kind.BACKWARD, stage, 0, 0), message)
    channel.close()


def clock(device: torch.device) -> Clock:
    """Seconds by the clock, read when the device has finished what it was given.

    Of the current stream only: on others there are receives that end when the other stage has answered.
    """
    if device.type == "cpu":
        return time.perf_counter

    def now() -> float:
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    return now
