"""What workers that die and come cost the others."""

from common.entry import run

if __name__ == "__main__":
    run("elastic", "costs")
