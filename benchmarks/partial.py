"""What partial backprop saves and what it loses; without a word it lists its commands."""

from common.entry import run

if __name__ == "__main__":
    run("partial")
