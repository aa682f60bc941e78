"""Sweeps that share devices; with a word another question about schedules."""

from common.entry import run

if __name__ == "__main__":
    run("sweep", "devices")
