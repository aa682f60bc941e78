"""Scripts in processes that hold nothing of the tests but have the package imported already.

Importing Lightning and torch costs more processor time than most scripts. A server that has done it once forks a child
for each script (`multiprocessing`'s forkserver: it has one thread, so its children are as sound as new processes).
"""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["lightning_decentral", "tests.fresh"])


@dataclass
class Script:
    """A file that runs as `__main__`, in its own folder, as the leader of a process group."""

    file: Path
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def __post_init__(self) -> None:
        descriptor, self._output = tempfile.mkstemp(prefix="script-")
        os.close(descriptor)
        self._process = _SERVER.Process(target=_main, args=(self._output, self))
        self._process.start()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_process"}

    def finish(self, seconds: float) -> tuple[int, str]:
        """(exit status, output); 124 where the whole group had to be killed because the time was over."""
        self._process.join(seconds)
        late = self._process.is_alive()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # whatever the run left behind, too
        self._process.join()
        output = Path(self._output)
        printed = output.read_text(errors="replace")
        output.unlink()
        return (124, f"killed after {seconds} s\n{printed}") if late else (self._process.exitcode or 0, printed)


def _main(output: str, script: Script) -> None:
    os.setsid()
    with open(output, "wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.update(script.environment)
    os.chdir(script.folder or script.file.parent)
    sys.argv = [str(script.file), *script.arguments]
    runpy.run_path(str(script.file), run_name="__main__")
