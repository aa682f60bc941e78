"""Decentralized data-parallel training by gossip: neighbours average parameters instead of all workers their gradients.

`strategy` runs gossip under Lightning's Trainer, with `island` for workers of several devices, and `fabric` under
Fabric. `mixer_builder` checks that the settings fit together, and makes the mixers. `summary` describes the settings at
the start, with bytes per step and per network card; `callbacks` and `report` log the run. Below: `plan` (communication
graphs, without torch), `compute` (update rules on tensors), `wire` (messages; `wire/assembly` draws a whole round).
Codecs are in `shared/compute/codec`. Public: all names below.

Wrong bytes: `plan/planned_traffic` and `summary` plan them, by worker; `wire/peer` and,
in cliques, `wire/assembly` count what is sent, by device."""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.elastic.option import Elastic as Elastic
    from lightning_decentral.elastic.plan.asynchronous import Asynchronous as Asynchronous
    from lightning_decentral.elastic.strategy import ElasticGossipStrategy as ElasticGossipStrategy
    from lightning_decentral.elastic.wire.rounds.simulation import simulate_asynchronous as simulate_asynchronous
    from lightning_decentral.gossip.callbacks import CommunicationMonitor as CommunicationMonitor
    from lightning_decentral.gossip.callbacks import ConsensusMonitor as ConsensusMonitor
    from lightning_decentral.gossip.callbacks import MixingMonitor as MixingMonitor
    from lightning_decentral.gossip.callbacks import WorkerLossMonitor as WorkerLossMonitor
    from lightning_decentral.gossip.compute.combine import Combine as Combine
    from lightning_decentral.gossip.compute.combine import ConsensusControl as ConsensusControl
    from lightning_decentral.gossip.compute.combine import ExactDiffusion as ExactDiffusion
    from lightning_decentral.gossip.compute.combine import Gossip as Gossip
    from lightning_decentral.gossip.compute.combine import GradientTracking as GradientTracking
    from lightning_decentral.gossip.compute.combine import LearningRatePower as LearningRatePower
    from lightning_decentral.gossip.compute.combine import LinearRate as LinearRate
    from lightning_decentral.gossip.compute.combine import MessageForm as MessageForm
    from lightning_decentral.gossip.compute.combine import Outer as Outer
    from lightning_decentral.gossip.compute.combine import OuterNesterov as OuterNesterov
    from lightning_decentral.gossip.compute.combine import PseudoGradient as PseudoGradient
    from lightning_decentral.gossip.compute.combine import PushSum as PushSum
    from lightning_decentral.gossip.compute.combine import QuasiGlobalMomentum as QuasiGlobalMomentum
    from lightning_decentral.gossip.compute.combine import Rate as Rate
    from lightning_decentral.gossip.compute.combine import RateSchedule as RateSchedule
    from lightning_decentral.gossip.compute.combine import Recovery as Recovery
    from lightning_decentral.gossip.compute.combine import RelaySum as RelaySum
    from lightning_decentral.gossip.compute.combine import Rule as Rule
    from lightning_decentral.gossip.compute.combine import State as State
    from lightning_decentral.gossip.compute.combine import Turn as Turn
    from lightning_decentral.gossip.compute.travel import Travel as Travel
    from lightning_decentral.gossip.fabric import FabricGossipStrategy as FabricGossipStrategy
    from lightning_decentral.gossip.island import AllReduce as AllReduce
    from lightning_decentral.gossip.island import FullyShard as FullyShard
    from lightning_decentral.gossip.island import Island as Island
    from lightning_decentral.gossip.island import Solo as Solo
    from lightning_decentral.gossip.pipeline_replicas import GossipReplicas as GossipReplicas
    from lightning_decentral.gossip.plan.checks import check as check
    from lightning_decentral.gossip.plan.forecast import GossipForecast as GossipForecast
    from lightning_decentral.gossip.plan.planned_traffic import all_reduce_copies as all_reduce_copies
    from lightning_decentral.gossip.plan.planned_traffic import copies_through_card as copies_through_card
    from lightning_decentral.gossip.plan.stability import largest_stable_rate as largest_stable_rate
    from lightning_decentral.gossip.plan.topology import AlternatingExponentialRing as AlternatingExponentialRing
    from lightning_decentral.gossip.plan.topology import Auto as Auto
    from lightning_decentral.gossip.plan.topology import BaseGraph as BaseGraph
    from lightning_decentral.gossip.plan.topology import Complete as Complete
    from lightning_decentral.gossip.plan.topology import Every as Every
    from lightning_decentral.gossip.plan.topology import Exponential as Exponential
    from lightning_decentral.gossip.plan.topology import FromGraph as FromGraph
    from lightning_decentral.gossip.plan.topology import Hypercube as Hypercube
    from lightning_decentral.gossip.plan.topology import OnePeerExponential as OnePeerExponential
    from lightning_decentral.gossip.plan.topology import OnePeerRing as OnePeerRing
    from lightning_decentral.gossip.plan.topology import PeriodicAverage as PeriodicAverage
    from lightning_decentral.gossip.plan.topology import RandomMatching as RandomMatching
    from lightning_decentral.gossip.plan.topology import Ring as Ring
    from lightning_decentral.gossip.plan.topology import Star as Star
    from lightning_decentral.gossip.plan.topology import Stream as Stream
    from lightning_decentral.gossip.plan.topology import Topology as Topology
    from lightning_decentral.gossip.plan.topology import Torus as Torus
    from lightning_decentral.gossip.plan.topology import Tree as Tree
    from lightning_decentral.gossip.plan.weights import Dyadic as Dyadic
    from lightning_decentral.gossip.plan.weights import MetropolisHastings as MetropolisHastings
    from lightning_decentral.gossip.plan.weights import OutDegree as OutDegree
    from lightning_decentral.gossip.plan.weights import Own as Own
    from lightning_decentral.gossip.plan.weights import Uniform as Uniform
    from lightning_decentral.gossip.plan.weights import Weights as Weights
    from lightning_decentral.gossip.plan.weights import consensus_steps as consensus_steps
    from lightning_decentral.gossip.plan.weights import mixing_matrix as mixing_matrix
    from lightning_decentral.gossip.plan.weights import spectral_gap as spectral_gap
    from lightning_decentral.gossip.report import Report as Report
    from lightning_decentral.gossip.report import StartSummary as StartSummary
    from lightning_decentral.gossip.speed import SpeedMonitor as SpeedMonitor
    from lightning_decentral.gossip.strategy import GossipStrategy as GossipStrategy
    from lightning_decentral.gossip.wire.simulation import MatrixExchange as MatrixExchange
    from lightning_decentral.gossip.wire.simulation import simulate as simulate
    from lightning_decentral.shared.compute.codec import BFloat16 as BFloat16
    from lightning_decentral.shared.compute.codec import Codec as Codec
    from lightning_decentral.shared.compute.codec import DifferenceCompression as DifferenceCompression
    from lightning_decentral.shared.compute.codec import Float16 as Float16
    from lightning_decentral.shared.compute.codec import Float32 as Float32
    from lightning_decentral.shared.compute.codec import Frame as Frame
    from lightning_decentral.shared.compute.codec import Int2 as Int2
    from lightning_decentral.shared.compute.codec import Int4 as Int4
    from lightning_decentral.shared.compute.codec import Int8 as Int8
    from lightning_decentral.shared.compute.codec import Payload as Payload
    from lightning_decentral.shared.compute.codec import PayloadPart as PayloadPart
    from lightning_decentral.shared.compute.codec import Plain as Plain
    from lightning_decentral.shared.compute.codec import TopK as TopK

__getattr__, __all__ = lazy_exports(__name__)
