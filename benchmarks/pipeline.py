"""What a token pipeline gains on one machine; with an argument another question about pipelines."""

from common.entry import run

if __name__ == "__main__":
    run("pipeline", "token_pipeline")
