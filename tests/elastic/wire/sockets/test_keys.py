"""A key is a file that only its user reads; anything else is one line, with the remedy."""

import datetime
import subprocess
from pathlib import Path

import pytest

from lightning_decentral.elastic.wire.sockets.keys import KEY, Key, key_of, new_key
from tests.elastic.wire import keyed


def test_no_key_is_none_and_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    assert key_of("") is None
    monkeypatch.setenv(KEY, keyed.key().path)
    found = key_of("")
    assert found
    assert found.path == keyed.key().path
    assert key_of(keyed.key("stranger").path).path == keyed.key("stranger").path  # type: ignore[union-attr]


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.key"
    new_key(str(file))
    file.chmod(0o640)
    with pytest.raises(ValueError, match=f"other users may read the key {file}: .*chmod 600"):
        Key(str(file))
    file.chmod(0o400)
    assert Key(str(file)).path == str(file)


@pytest.mark.parametrize("text", ["", "text", None])
def test_what_is_no_key_is_one_line(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "run.key"
    if text is not None:
        file.write_text(text)
        file.chmod(0o600)
    with pytest.raises(ValueError, match=r"is no key \(.*\): make one by `lightning-decentral lobby --new-key") as said:
        Key(str(file))
    assert "\n" not in str(said.value)


def test_half_a_key_is_none(tmp_path: Path) -> None:
    """A certificate alone, which a listener on the way could have seen, isn't enough."""
    file = tmp_path / "run.key"
    text = Path(keyed.key().path).read_text()
    file.write_text(text[text.index("-----BEGIN CERTIFICATE") :])
    file.chmod(0o600)
    with pytest.raises(ValueError, match="is no key"):
        Key(str(file))


def test_without_openssl_there_is_one_line_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="takes the program openssl"):
        new_key(str(tmp_path / "run.key"))
    assert not list(tmp_path.iterdir())


def test_a_key_is_good_for_longer_than_any_run() -> None:
    command = ["openssl", "x509", "-in", keyed.key().path, "-noout", "-enddate"]
    end = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().partition("=")[2]
    assert datetime.datetime.strptime(end, "%b %d %H:%M:%S %Y %Z").year > 2100
