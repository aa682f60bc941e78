"""Faults, injected into real runs of the package: what becomes of the others."""

from common.entry import run

if __name__ == "__main__":
    run("faults", "table")
