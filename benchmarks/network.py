"""Seconds on slow networks, measured and predicted; without arguments it lists its commands."""

from common.entry import run

if __name__ == "__main__":
    run("network")
