"""The papers' headline numbers on the same work here; without a word all rows."""

from common.entry import run

if __name__ == "__main__":
    run("papers", "rows")
