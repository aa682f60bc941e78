"""Keys for tests: the run's, and a stranger's, who made one too."""

import functools
import tempfile
from pathlib import Path

from lightning_decentral.elastic.wire.sockets.keys import Key, new_key


@functools.cache
def key(name: str = "run") -> Key:
    """The key of this name; each name has another."""
    file = Path(tempfile.mkdtemp()) / f"{name}.key"
    new_key(str(file))
    return Key(str(file))
