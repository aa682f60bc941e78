"""A CUDA device that isn't there: its tensors lie in the host's memory, its streams run late and in any legal order.

Operations are queued on the stream that is current. They run when the host waits, and now and then before: the engine
takes the next from a stream whose head may run, at random, mostly from one that is far ahead of the others. What an
operation makes is poison (NaN) until it has run. Memory that is given back is poisoned in the order of the stream that
made it, as if it were somebody else's, unless `record_stream` says who still reads it. What the host must wait for is
noted with the line that asked. So a missing wait, a buffer that goes back too early and a host that waits show on any
machine, in some schedule; the seed gives the schedule.

To autograd the tensors are the host's, so that forward, backward and hooks run as they are; to Python they say `cuda`.
Not simulated: how fast anything is, several devices of one worker, and the streams on which a real backward runs (that
of each forward operation; here the one that is current).
"""

from tests.simulated.door import device, door
from tests.simulated.streams import CUDA, Engine, at, current, here

__all__ = ["CUDA", "Engine", "at", "current", "device", "door", "here"]
