"""Scripts in processes that hold nothing of the tests but have the package imported already.

Importing Lightning and torch costs more processor time than most scripts. A server is forked from the tests' process
before it collects tests, with the package imported, and forks a child for each script.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

STAND_IN = "TESTS_STAND_IN"
"""The variable with what a script takes for its interpreter when it starts others."""


class Script:
    """A file that runs as `__main__`, as the leader of a process group.

    Args:
        file: need not end in .py.
        arguments: the words behind it.
        environment: added to the tests' own; None takes a variable away.
        folder: where it runs; the file's own.
    """

    def __init__(
        self,
        file: Path,
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str | None] | None = None,
        folder: Path | None = None,
    ) -> None:
        descriptor, output = tempfile.mkstemp(prefix="script-")
        os.close(descriptor)
        self._output = Path(output)
        variables = {**os.environ, **(environment or {})}
        present = {name: value for name, value in variables.items() if value is not None}
        self.pid: int = _ask("start", output, [str(file), *arguments], present, (folder or file.parent).resolve())

    def status(self, seconds: float) -> int | None:
        """Its exit status, for which it has so long; None while it runs."""
        status: int | None = _ask("join", self.pid, seconds)
        return status

    def finish(self, seconds: float) -> tuple[int, str]:
        """(exit status, output); 124 where the whole group had to be killed because the time was over."""
        status = self.status(seconds)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # whatever the run left behind, too
        _ask("join", self.pid, None)
        printed = self._output.read_text(errors="replace")
        self._output.unlink()
        return (124, f"killed after {seconds} s\n{printed}") if status is None else (status, printed)


_ONE_AT_A_TIME = threading.Lock()


def _ask(*question: object) -> Any:
    with _ONE_AT_A_TIME:
        server().send(question)
        return server().recv()


@cache
def server() -> Connection:
    """Forked at the first call; it ends when nobody holds the other end of its pipe any more."""
    # What its children find imported.
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from lightning_decentral import GossipStrategy, PartialBackpropStrategy, SpilledStrategy, TokenPipelineStrategy  # noqa: F401

    # A torchrun calls it for each of its events; as it is, it looks through all modules for the lines of all frames.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    ours, its = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # what a terminal sends to the tests' group is not for it
        gc.freeze()  # a collection in a child would touch, and so copy, all that it shares
        ours.close()
        _serve(its)
        os._exit(0)
    its.close()
    Finalize(None, _end, (pid,), exitpriority=0)
    return ours


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _serve(questions: Connection) -> None:
    scripts: dict[int, BaseProcess] = {}

    def start(*words: object) -> int:
        process = multiprocessing.get_context("fork").Process(target=_main, args=words)
        process.start()
        assert process.pid is not None
        scripts[process.pid] = process
        return process.pid

    def join(pid: int, seconds: float | None) -> int | None:
        scripts[pid].join(seconds)
        return scripts[pid].exitcode

    answers = {"start": start, "join": join}
    with suppress(EOFError):
        while True:
            name, *words = questions.recv()
            questions.send(answers[name](*words))
    for pid, process in scripts.items():
        if process.is_alive():  # the tests were killed
            os.killpg(pid, signal.SIGKILL)


def _main(output: str, words: list[str], environment: dict[str, str], folder: Path) -> None:
    os.setsid()
    gc.enable()  # the tests' process was still collecting when the server was forked
    with open(output, "wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = os.environ.pop(STAND_IN, sys.executable)
    tempfile.tempdir = None
    os.chdir(folder)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
