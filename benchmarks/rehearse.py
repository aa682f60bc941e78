"""Rehearsed and simulated runs against real ones, and what they cost; without arguments it lists its commands."""

from common.entry import run

if __name__ == "__main__":
    run("rehearse")
