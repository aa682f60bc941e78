"""Sweeps that share devices; with an argument another question about schedules."""

from common.entry import run

if __name__ == "__main__":
    run("sweep", "devices")
