"""Scripts whose workers, too, have the package imported already.

Lightning and torchrun start a worker as a new interpreter, which imports torch and Lightning: 6 s of a processor. Here
that interpreter is a shell, which says what it was given, waits for a process of the server (tests/fresh.py) that gets
the same file, words and variables, and ends as that does.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.fresh import STAND_IN, Script

# It waits at a named pipe: a loop with `sleep` in it would start twenty processes a second.
SHELL = """#!/bin/sh
me={folder}/$$
printf '%s\\0' "$(pwd)" "$@" > $me.words
mkfifo $me.code
env -0 > $me.partial && mv $me.partial $me.environment
read code < $me.code
exit $code
"""


class Launching(Script):
    """As a script; what its workers print stands behind its own output."""

    def __init__(
        self,
        file: Path,
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str | None] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="workers-"))
        shell = self._place / "python"
        shell.write_text(SHELL.format(folder=self._place))
        shell.chmod(0o755)
        self._workers: dict[Path, Script] = {}
        super().__init__(file, arguments, {**(environment or {}), STAND_IN: str(shell)}, folder)

    def finish(self, seconds: float) -> tuple[int, str]:
        end = time.monotonic() + seconds
        while self.status(0.05) is None and time.monotonic() < end:
            self._start()
            self._pass_on()
        ended = [super().finish(0), *(worker.finish(0) for worker in self._workers.values())]
        for given in self._workers:
            _tell(given, 1)  # a shell that torchrun left behind
        shutil.rmtree(self._place)
        return ended[0][0], "\n".join(printed for _, printed in ended)

    def _start(self) -> None:
        for given in set(self._place.glob("*.environment")) - self._workers.keys():
            # torchrun asks for output without a buffer
            folder, file, *words = [word for word in _entries(given.with_suffix(".words")) if word != "-u"]
            variables = dict(entry.split("=", 1) for entry in _entries(given))
            self._workers[given] = Script(Path(file), tuple(words), variables, Path(folder))

    def _pass_on(self) -> None:
        for given, worker in self._workers.items():
            if (status := worker.status(0)) is not None:
                _tell(given, abs(status))  # a signal is one of the codes of a failure


def _entries(file: Path) -> list[str]:
    return file.read_text().rstrip("\0").split("\0")


def _tell(given: Path, code: int) -> None:
    """To the shell, where it waits: it may not do so yet, or not any more."""
    with suppress(OSError), open(os.open(given.with_suffix(".code"), os.O_WRONLY | os.O_NONBLOCK), "w") as pipe:
        pipe.write(f"{code}\n")
