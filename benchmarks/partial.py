"""What partial backprop saves and what it loses; without arguments it lists its commands."""

from common.entry import run

if __name__ == "__main__":
    run("partial")
