"""Processes of a sweep's members: how they start (fork or spawn), and how they end with the sweep."""

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction

from lightning_decentral.sweep.member import SweepMember, returned, write_record
from lightning_decentral.sweep.wire.client import Admission

Run = Callable[[SweepMember], JobReturn]
Lifeline = tuple[Connection, Connection]  # (the end that a member's process reads, the end that the sweep keeps open)


def fork(run: Run, member: SweepMember, environment: Mapping[str, str], lifeline: Lifeline) -> Any:
    """Start a member's process by fork: at once, without pickling."""

    def main() -> None:
        lifeline[1].close()  # only the sweep may keep the writing end open, or its end goes unnoticed
        live(member, environment, lifeline[0], run)

    # Buffered output would be printed by the fork, too.
    sys.stdout.flush()
    sys.stderr.flush()
    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


def spawn(run: Run, member: SweepMember, environment: Mapping[str, str], lifeline: Lifeline) -> Any:
    """Start a member's process as a new interpreter, for processes with threads or a GPU, which a fork couldn't use."""
    arguments = (packed(run, member), dict(environment), lifeline[0])
    process = multiprocessing.get_context("spawn").Process(target=spawned, args=arguments)
    # In the environment: the new interpreter first imports the user's script, which may ask for GPUs.
    before = {name: os.environ[name] for name in environment if name in os.environ}
    os.environ.update(environment)
    try:
        process.start()
    finally:
        for name in environment.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    return process


def packed(run: Run, member: SweepMember) -> bytes:
    """Pickle all that a new interpreter needs; functions of a script and local functions by value. ValueError:
    cloudpickle is missing."""
    try:
        import cloudpickle
    except ImportError:
        raise ValueError(
            "members that can't be forked (GPUs) need cloudpickle: pip install 'lightning-decentral[sweeps]'"
        ) from None
    return bytes(cloudpickle.dumps((Singleton.get_state(), run, member)))


def spawned(content: bytes, environment: dict[str, str], lifeline: Connection) -> None:
    """Run as the main function of a new interpreter."""
    singletons, run, member = pickle.loads(content)
    Singleton.set_state(singletons)
    live(member, environment, lifeline, run)


def run_member(hydra_context: HydraContext, task_function: TaskFunction, member: SweepMember) -> JobReturn:
    """Run the member as Hydra's own launchers do."""
    setup_globals()
    return run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=member.config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def live(member: SweepMember, environment: Mapping[str, str], lifeline: Connection, run: Run) -> None:
    """Run a member's process from its start to its record; its output goes to the member's log."""
    # A session of its own: Ctrl-C reaches only the sweep, and killing the group ends all that the member started.
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has inherited the sweep's handler
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a sweep in the background of a shell ignores it
    os.environ.update(environment)
    watch = threading.Thread(target=_die_with, args=(lifeline, Admission.found(environment)), daemon=True)
    watch.start()
    member.log.parent.mkdir(parents=True, exist_ok=True)
    with member.log.open("ab") as stream:  # by file descriptor: output of libraries and children goes to the log, too
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    write_record(member, attempt(member, run))
    logging.shutdown()
    if lifeline.poll():  # the sweep was killed: ending before this check would leave its socket behind
        watch.join()


def _die_with(lifeline: Connection, admission: Admission | None) -> None:
    try:
        lifeline.recv_bytes()  # nothing is ever sent: the call returns when the sweep has ended, however suddenly
    except (EOFError, OSError):
        if admission is not None:  # a killed sweep couldn't remove its socket's folder
            shutil.rmtree(Path(admission.socket).parent, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def attempt(member: SweepMember, run: Run) -> JobReturn:
    """Run a member and return its outcome; an interrupted member has none and stays unfinished.

    A program that ends with a message, sys.exit("error: ..."), has failed with that message."""
    try:
        outcome = run(member)
    except SystemExit as ended:
        if not ended.code:
            return returned(member, JobStatus.COMPLETED, None)
        print(ended.code, file=sys.stderr)
        return returned(member, JobStatus.FAILED, ended)
    except Exception as error:
        outcome = returned(member, JobStatus.FAILED, error)
    if outcome.status is JobStatus.FAILED:
        # Hydra keeps the exception and prints nothing; the member's log needs it
        traceback.print_exception(outcome._return_value)
    return outcome


def kill_group(pid: int) -> None:
    """Kill a process and all that it has started, as far as they are alive."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
