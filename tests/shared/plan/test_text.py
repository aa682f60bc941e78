"""Files that aren't text, in every reader of a file that a command is given: one line with the file and the remedy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_decentral.planner.plan import host_links
from lightning_decentral.shared.plan import profile
from lightning_decentral.shared.plan.text import text_of
from lightning_decentral.sweep.plan.jobs_file import read_gangs, read_jobs, read_tables
from lightning_decentral.sweep.plan.traces import LAYOUTS, read_trace

READERS: dict[str, Callable[[Path], Any]] = {
    "profile": profile.read,
    "hosts": host_links.read,
    "trace": lambda path: read_trace(path, LAYOUTS["gavel"]),
    "jobs": read_jobs,
    "gangs": read_gangs,
    "tables": read_tables,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_what_is_no_utf_8_is_one_line_with_the_remedy(tmp_path: Path, reader: str, encoding: str) -> None:
    path = tmp_path / "given.csv"
    path.write_bytes("jobs: [{name: Größe, seconds: [1]}]".encode(encoding))
    with pytest.raises(ValueError, match=r"given\.csv is no UTF-8 text \(byte .*\): save it as UTF-8, or ") as error:
        READERS[reader](path)
    assert len(str(error.value).splitlines()) == 1


def test_a_byte_order_mark_is_none_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_bytes("jobs: [{name: Größe, pieces: [1]}]".encode("utf-8-sig"))
    assert text_of(path, "give a file").startswith("jobs")
    assert [queue.name for queue in read_jobs(path).queues] == ["Größe"]
