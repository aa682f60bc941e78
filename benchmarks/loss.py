"""Losses, and seconds to them, of gossip and the strongest forms of `ddp`; without arguments it lists its commands."""

from common.entry import run

if __name__ == "__main__":
    run("loss")
