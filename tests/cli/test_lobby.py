"""The lobby's words; it listens, and says in one line why it can't."""

import socket
from pathlib import Path
from typing import Any

import pytest

from lightning_decentral.cli import lobby
from lightning_decentral.elastic.plan.view import Bounds, Times
from lightning_decentral.elastic.wire.sockets.keys import KEY
from lightning_decentral.recipes.command import main


def test_its_words_become_bounds_and_times(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    served: list[Any] = []
    monkeypatch.setattr(lobby, "serve", lambda *args: (served.append(args), args[4](args[3])))
    main(["lobby", "--workers", "2:16", "--dead-after", "3", "--address", "10.0.0.1"])
    assert served[0][:4] == (Bounds(2, 16), Times(3.0), "10.0.0.1", 29400)
    assert served[0][5] is None
    assert capsys.readouterr().out == "listening at port 29400 for 2 to 16 workers\n"


def test_a_key_is_made_once_and_given_to_the_lobby(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, file = list[Any](), tmp_path / "run.key"
    monkeypatch.setattr(lobby, "serve", lambda *args: (served.append(args), args[4](args[3])))
    main(["lobby", "--new-key", str(file)])
    assert file.stat().st_mode & 0o777 == 0o600
    made = file.read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["lobby", "--new-key", str(file)])
    assert "isn't overwritten" in str(ended.value.code)
    assert file.read_bytes() == made
    main(["lobby", "--workers", "2:16", "--key", str(file)])
    monkeypatch.setenv(KEY, str(file))
    main(["lobby", "--workers", "2:16"])
    assert [args[5].path for args in served] == [str(file)] * 2
    assert capsys.readouterr().out.endswith("listening at port 29400 for 2 to 16 workers with the key\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--workers"),
        ("--workers 16", "LEAST:MOST such as 2:16, got '16'"),
        ("--workers 3:2", "got '3:2'"),
        ("--workers 0:2", "got '0:2'"),
        ("--workers 2:4 --dead-after 0", "dead_after must be more than 0"),
        ("--workers 2:4 --new-key run.key", "not allowed with"),
        (
            "--workers 2:4 --key /nowhere/run.key",
            "'/nowhere/run.key' is no key (No such file or directory): make one by",
        ),
        ("--workers 2:4 --port 70000", "--port must be from 0 to 65535, got 70000"),
    ],
)
def test_wrong_words_are_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lobby", *words.split()])
    line = capsys.readouterr().err.strip() if ended.value.code == 2 else str(ended.value.code)
    assert line.startswith("error: ")
    assert said in line
    assert "\n" not in line


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit) as ended:
        main(["lobby", "--workers", "1:2", "--address", "127.0.0.1", "--port", str(other.getsockname()[1])])
    assert "Address already in use" in str(ended.value.code)
