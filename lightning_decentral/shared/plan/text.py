"""Text files that commands are given: UTF-8 everywhere, and one line for what can't be read.

Short, so that no command reads a file in another way.
"""

from pathlib import Path


def text_of(path: str | Path, remedy: str) -> str:
    """The contents, without a byte order mark.

    Args:
        remedy: what to do instead, such as "give a trace".

    Raises:
        ValueError: it can't be read, or isn't UTF-8.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}): {remedy}") from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} is 0x{error.object[error.start]:02x}"
        raise ValueError(f"{path} is no UTF-8 text ({byte}): save it as UTF-8, or {remedy}") from None
