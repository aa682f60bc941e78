"""What a worker does with what it heard: gossip averaging, push-sum, gradient tracking, outer momentum, relay sums.

`combine` says what a rule is, `rate` how far it moves towards the others; each other module holds a rule or two.
Public: all names below.
"""

from lightning_decentral.gossip.compute.combine.combine import Combine, State, Turn
from lightning_decentral.gossip.compute.combine.consensus_control import ConsensusControl
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.compute.combine.gradient_tracking import ExactDiffusion, GradientTracking
from lightning_decentral.gossip.compute.combine.momentum import Outer, OuterNesterov, QuasiGlobalMomentum
from lightning_decentral.gossip.compute.combine.push_sum import PushSum
from lightning_decentral.gossip.compute.combine.rate import LearningRatePower, LinearRate, Rate, RateSchedule
from lightning_decentral.gossip.compute.combine.relay_sum import RelaySum

__all__ = [
    "Combine",
    "ConsensusControl",
    "ExactDiffusion",
    "Gossip",
    "GradientTracking",
    "LearningRatePower",
    "LinearRate",
    "Outer",
    "OuterNesterov",
    "PushSum",
    "QuasiGlobalMomentum",
    "Rate",
    "RateSchedule",
    "RelaySum",
    "State",
    "Turn",
]
