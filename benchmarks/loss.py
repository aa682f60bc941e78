"""Losses and seconds to them, of gossip and of the strongest forms of `ddp`; without a word it lists its commands."""

from common.entry import run

if __name__ == "__main__":
    run("loss")
