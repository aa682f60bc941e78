"""A cluster on one machine: hosts are network namespaces, links are token buckets of a given rate."""

from common.entry import run

if __name__ == "__main__":
    run("network", "cluster")
