"""Scores of a member in its folder, as JSON: with whom members of a resumed sweep are compared.

{"scores": [{"metric": "val_loss", "mode": "min", "step": 64, "value": 0.3}], "verdict": null}

Short, as its format is separate from the record's.
"""

import json
from dataclasses import asdict

from lightning_decentral.sweep.member import SweepMember
from lightning_decentral.sweep.plan.scores import Scoreboard
from lightning_decentral.sweep.wire.client import score_of

FILE = "scores.json"


def write_scores(entrant: SweepMember, board: Scoreboard) -> None:
    """Write the member's scores so far, and why it was ended: whole or not at all."""
    entrant.folder.mkdir(parents=True, exist_ok=True)
    scores = [asdict(score) for score in board.histories.get(entrant.name, [])]
    new = entrant.folder / f".{FILE}"
    new.write_text(json.dumps({"scores": scores, "verdict": board.verdicts.get(entrant.name)}, indent=1))
    new.replace(entrant.folder / FILE)


def read_scores(entrant: SweepMember, board: Scoreboard) -> None:
    """Read the folder's scores and verdict onto the board, if there are any.

    Raises:
        ValueError: it is no such file.
    """
    path = entrant.folder / FILE
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text())
        for score in map(score_of, found["scores"]):
            board.add(entrant.name, score)
        if found["verdict"] is not None:
            board.verdicts[entrant.name] = str(found["verdict"])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} holds no scores of a member ({reason}): remove it") from None


def forget_scores(entrant: SweepMember) -> None:
    """An earlier sweep's are not this one's."""
    (entrant.folder / FILE).unlink(missing_ok=True)
