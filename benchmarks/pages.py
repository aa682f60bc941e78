"""Tables of the docs, and Markdown reports of results; without arguments it lists its commands."""

from common.entry import run

if __name__ == "__main__":
    run("pages")
