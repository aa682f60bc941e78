"""What gossip costs one CUDA device; with an argument another question about devices."""

from common.entry import run

if __name__ == "__main__":
    run("gpu", "step")
