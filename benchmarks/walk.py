"""What somebody reads who follows one round of gossip from the mixer to the bytes: files, functions, moves.

    python benchmarks/walk.py

One worker on a ring with two neighbours, one bucket, delay 1 on the host: a transport in memory answers at once. After
five rounds that build what is kept, `sys.setprofile` (and threading's) notes every function of the package that is
entered, thread by thread in order. A move is a function that lies in another file than the one entered before it; going
on to another thread is one, too. Comprehensions are no functions to a reader.
"""

import argparse
import sys
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import lightning_decentral
from lightning_decentral.gossip import Codec, Gossip, Int8, Own, Plain, Ring
from lightning_decentral.gossip.round_cost import LoopbackTransport
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.overlap import overlapped
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute.buckets import pack

PACKAGE = str(Path(lightning_decentral.__file__).parent)
INLINE = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
WORKERS, ELEMENTS, WARM_UP = 4, 4096, 5


class Walk(NamedTuple):
    """Modules that were entered, by thread."""

    entered: dict[str, list[tuple[str, str]]]

    @property
    def files(self) -> int:
        return len({file for thread in self.entered.values() for file, _ in thread})

    @property
    def functions(self) -> int:
        return len({function for thread in self.entered.values() for function in thread})

    @property
    def calls(self) -> int:
        return sum(map(len, self.entered.values()))

    @property
    def moves(self) -> int:
        within = sum(a[0] != b[0] for thread in self.entered.values() for a, b in pairwise(thread))
        return within + len(self.entered) - 1


def walk(codec: Codec) -> Walk:
    """One round with this codec."""
    entered: dict[str, list[tuple[str, str]]] = defaultdict(list)
    noting = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if noting and event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in INLINE:
            name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")
            entered[threading.current_thread().name].append((code.co_filename[len(PACKAGE) + 1 :], name))

    threading.setprofile(note)  # for the threads of the exchange, which begin with its first round
    try:
        mixer, round_ = _mixer(codec), WARM_UP
        for _ in range(round_):
            mixer.step()
        _arrived(mixer)
        noting = True
        sys.setprofile(note)
        mixer.step()
        sys.setprofile(None)
        _arrived(mixer)
        noting = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    mixer.drain()
    return Walk(dict(entered))


def _mixer(codec: Codec) -> Mixer:
    host = torch.device("cpu")
    exchange = PeerExchange(Ring(), Own(), LoopbackTransport(WORKERS), host, codec)
    mixer = Mixer([], Gossip(), overlapped(exchange, host, 1), 1)
    mixer.extend(pack([nn.Parameter(torch.randn(ELEMENTS))]))
    return mixer


def _arrived(mixer: Mixer) -> None:
    """Wait for the threads without entering what is counted."""
    for flight in mixer._flights:
        for message in flight.messages:
            message.landed.exception()  # waits, and leaves an error to whoever lands it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("| codec | files | functions | calls | moves between files |")
    print("| --- | --- | --- | --- | --- |")
    walks = {repr(codec): walk(codec) for codec in (Plain(), Int8())}
    for codec, found in walks.items():
        print(f"| `{codec}` | {found.files} | {found.functions} | {found.calls} | {found.moves} |")
    for codec, found in walks.items():
        for thread, functions in found.entered.items():
            print(f"\n{codec}, {thread}")
            for before, (file, name) in zip([("", ""), *functions], functions, strict=False):
                print(f"  {'' if before[0] == file else file:45} {name}")


if __name__ == "__main__":
    main()
