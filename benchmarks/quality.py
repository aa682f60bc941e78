"""Does the mean model under gossip reach what `ddp` reaches at equal steps? With an argument another question."""

from common.entry import run

if __name__ == "__main__":
    run("quality", "against_ddp")
