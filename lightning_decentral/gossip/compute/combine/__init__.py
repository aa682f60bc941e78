"""Update rules of decentralized training: gossip averaging, push-sum, gradient tracking, outer momentum, relay sums.

A worker applies an update rule to the messages that it received. `combine` defines the interface of rules, `gossip` the
plain rule and mixing rates; `consensus_control` adapts the number of rounds to the workers' distance. Public: all names
below."""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.gossip.compute.combine.combine import Combine as Combine
    from lightning_decentral.gossip.compute.combine.combine import MessageForm as MessageForm
    from lightning_decentral.gossip.compute.combine.combine import Recovery as Recovery
    from lightning_decentral.gossip.compute.combine.combine import Rule as Rule
    from lightning_decentral.gossip.compute.combine.combine import State as State
    from lightning_decentral.gossip.compute.combine.combine import Turn as Turn
    from lightning_decentral.gossip.compute.combine.consensus_control import ConsensusControl as ConsensusControl
    from lightning_decentral.gossip.compute.combine.gossip import Gossip as Gossip
    from lightning_decentral.gossip.compute.combine.gossip import LearningRatePower as LearningRatePower
    from lightning_decentral.gossip.compute.combine.gossip import LinearRate as LinearRate
    from lightning_decentral.gossip.compute.combine.gossip import Rate as Rate
    from lightning_decentral.gossip.compute.combine.gossip import RateSchedule as RateSchedule
    from lightning_decentral.gossip.compute.combine.gradient_tracking import ExactDiffusion as ExactDiffusion
    from lightning_decentral.gossip.compute.combine.gradient_tracking import GradientTracking as GradientTracking
    from lightning_decentral.gossip.compute.combine.gradient_tracking import QuasiGlobalMomentum as QuasiGlobalMomentum
    from lightning_decentral.gossip.compute.combine.outer import Outer as Outer
    from lightning_decentral.gossip.compute.combine.outer import OuterNesterov as OuterNesterov
    from lightning_decentral.gossip.compute.combine.outer import PseudoGradient as PseudoGradient
    from lightning_decentral.gossip.compute.combine.sums import PushSum as PushSum
    from lightning_decentral.gossip.compute.combine.sums import RelaySum as RelaySum

__getattr__, __all__ = lazy_exports(__name__)
