"""RaNNC's question, the largest model that can be trained, by this package's plans of memory: devices of 24 GiB.

    a device alone    16 bytes a parameter and what a step saves
    a pipeline        `Pipelining.memory_bytes`, the fullest stage
    spilled           two blocks, their activations and gradients; 16 bytes a parameter on the host

Transformer blocks of width 2,048 on sequences of 512, Adam in single precision. Source: Tanaka et al. 2103.16063.
"""

from lightning_decentral.pipeline.plan.forecast import Pipelining
from lightning_decentral.shared.plan.forecast import Cluster, Setting
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import BlockCost, LinkCost, Model
from lightning_decentral.spilled.plan.shards import BlockFootprint, Footprint, ShardPlan, Visit
from papers.row import Row, write

DEVICE_BYTES, HOST_BYTES = 24 * 2**30, 256 * 2**30
WIDTH, HEADS, LENGTH, BATCH = 2048, 32, 512, 8
PARAMETERS = 12 * WIDTH**2  # of a block
SAVED_BYTES = BATCH * LENGTH * (68 * WIDTH + 10 * HEADS * LENGTH)
HIDDEN_BYTES = 4 * BATCH * LENGTH * WIDTH
FLOPS, LINK_BYTES_PER_SECOND = 0.5 * 35e12, 16e9
MICROBATCHES = 4  # for each stage
SPILLED_BLOCKS = 64
"""Blocks of the footprint, whose peak doesn't depend on their number."""


def seconds() -> float:
    """Seconds of a block's forward."""
    return BATCH * LENGTH * (24 * WIDTH**2 + 4 * WIDTH * LENGTH) / FLOPS


def setting(blocks: int, devices: int) -> Setting:
    one = BlockCost("", seconds(), 2 * seconds(), 0.0, 4 * PARAMETERS, SAVED_BYTES, HIDDEN_BYTES)
    model = Model("transformer", "24 GiB", (one,) * blocks, state_bytes=2 * 4 * PARAMETERS * blocks)
    links = [LinkCost("exchange", "inside", n, 1, 0.0, 16e9) for n in (1, 2, 3)]
    return Setting(model, Network(tuple(links)), Cluster(devices, devices))


def largest(devices: int) -> float:
    """Parameters of the largest model that a pipeline of so many devices holds, one device being all of it."""
    blocks = devices
    method = Pipelining(stages=devices, microbatches=MICROBATCHES * devices)
    while method.memory_bytes(setting(blocks + devices, devices)) <= DEVICE_BYTES:
        blocks += devices
    return float(blocks * PARAMETERS)


def spilled() -> ShardPlan:
    names = range(SPILLED_BLOCKS)
    blocks = tuple(BlockFootprint(f"block {i}", {f"block {i}": 4 * PARAMETERS}) for i in names)
    forward = [Visit(i, False, seconds(), 2 * HIDDEN_BYTES, HIDDEN_BYTES) for i in names]
    # A backward holds what its second forward saved, and the gradients of its parameters until they have left.
    held = SAVED_BYTES + 2 * HIDDEN_BYTES
    backward = [
        Visit(i, True, 3 * seconds(), held, 4 * PARAMETERS, HIDDEN_BYTES, seconds(), SAVED_BYTES) for i in names[::-1]
    ]
    footprint = Footprint(blocks, (*forward, *backward), HIDDEN_BYTES, LINK_BYTES_PER_SECOND)
    return ShardPlan(footprint, tuple((i,) for i in names))


def row() -> Row:
    alone, shards = largest(1), spilled()
    assert shards.peak_bytes <= DEVICE_BYTES
    on_host = HOST_BYTES // (16 * PARAMETERS) * PARAMETERS
    return Row(
        name="rannc",
        paper="2103.16063",
        title="RaNNC",
        headline="models five times larger than Megatron-LM could train on the same devices, at equal throughput "
        "(abstract)",
        compared=(("times larger than without, on the same devices", 5.0, on_host / alone),),
        kind="formula",
        assumptions=(
            "Blocks of width 2,048 with 32 heads, 8 sequences of 512 for each device, single precision, Adam: 16 "
            "bytes a parameter; a block saves 68 h bytes a token and its scores twice.",
            "Ours is one device of 24 GiB with `spilled` and a host of 256 GiB, which bounds it: the device's peak "
            "doesn't grow with the number of blocks. Without is the same device with everything on it.",
            "Pipelines run 1F1B with four micro-batches for each stage and without recomputation.",
        ),
        cannot_compare="Megatron-LM as their base: this package has no tensor parallelism, and their largest models "
        "ran on 32 V100 of 32 GB.",
        contradicts="Size costs time here: a step of `spilled` takes 1.34 times one with everything on the device, as "
        "it runs every forward again; RaNNC's throughput is equal.",
        further=(
            ("billions of parameters, one device", alone / 1e9),
            ("billions of parameters, a pipeline of 2", largest(2) / 1e9),
            ("billions of parameters, a pipeline of 4", largest(4) / 1e9),
            ("billions of parameters, one device with spilled", on_host / 1e9),
            ("GiB on the device with spilled", shards.peak_bytes / 2**30),
            ("times the seconds of a step, spilled over everything on the device",
             shards.seconds / (3 * SPILLED_BLOCKS * seconds())),
        ),
    )  # fmt: skip


def main() -> None:
    write(row())
