"""Stores for checkpoints' files: on a local file system, whole or not at all, or by the user's CheckpointIO plugin.

A worker's file is `DIR/.workers/NAME/worker-0-of-4.IDENTITY.state`, near `DIR/NAME.ckpt`: the identity is the save's,
so that the files of two saves under one name stand side by side until the newer save is complete."""

import errno
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from lightning.fabric.plugins import CheckpointIO

LOCAL = ("file://", "local://")
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.partial")


def plain(path: str | Path) -> str:
    """Return the path of a URL of the local file system (`file:///tmp/x.ckpt`), since the paths here aren't split as
    URLs are. Any other path or URL is returned unchanged."""
    text = os.fspath(path)
    inner: str = url_to_fs(text)[1] if text.startswith(LOCAL) else text
    return inner


def parent(path: str | Path) -> str:
    """Return the folder of a path or URL; a URL's scheme is no folder."""
    scheme, mark, rest = os.fspath(path).rpartition("://")
    return f"{scheme}{mark}{os.path.dirname(rest)}"


def name_of(path: str | Path) -> str:
    """Return the name of a checkpoint's folder of workers' files: `last` for `last.ckpt`; unique, never `*.ckpt`."""
    name = os.path.basename(os.fspath(path)).replace("%", "%25")
    stem = name.removesuffix(".ckpt") if name.endswith(".ckpt") else f"{name}%"
    return stem.replace(".ckpt", "%ckpt")


def folder(path: str | Path, name: str = "") -> str:
    """Return the folder of the workers' files of a checkpoint; `name` replaces the checkpoint's own name."""
    return os.path.join(parent(path), ".workers", name or name_of(path))


def file(path: str | Path, rank: int, size: int, identity: str, name: str = "") -> str:
    """Return the path of one worker's file of one save."""
    return os.path.join(folder(path, name), f"worker-{rank}-of-{size}.{identity}.state")


def listed(place: str) -> list[str]:
    """List the files of a local or remote folder; none where there is no folder."""
    fs, inner = url_to_fs(place)
    names = fs.ls(inner, detail=False) if fs.isdir(inner) else []
    return sorted(os.path.join(place, os.path.basename(name.rstrip("/"))) for name in names)


def sync(place: str) -> None:
    """Flush a folder, so that renames in it survive a loss of power, where the file system can promise it."""
    handle = os.open(place or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def make(place: str) -> None:
    """Make a folder and its parents, and flush each one's entry to disk."""
    if place and not os.path.isdir(place):
        above = os.path.dirname(place)
        make(above)
        with suppress(FileExistsError):  # another worker was faster
            os.mkdir(place)
        sync(above)


def prune(place: str) -> None:
    """Remove a local folder and `.workers` above it, where they are empty."""
    for folder in (place, os.path.dirname(place)):
        with suppress(OSError):  # not empty, not there, or not local
            os.rmdir(folder)


class Durable:
    """Writes a file next to its target, flushes it to disk, then renames it: readers find the old file or the new."""

    sealed = True  # files are read back as they were written, so that digests match
    kept = 1  # number of saves under one name whose workers' files are kept

    def write(self, content: dict[str, Any], path: str, identity: str) -> None:
        place, name = os.path.split(path)
        make(place)
        partial = os.path.join(place, f".{name}.{identity}.partial")
        try:
            with open(partial, "wb") as stream:
                torch.save(content, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise

    def settle(self, path: str) -> None:
        """Flush the folder of `path`, so that the file written there survives a loss of power."""
        sync(os.path.dirname(path))

    def remove(self, path: str) -> None:
        """Remove a file, if it's there."""
        with suppress(FileNotFoundError):  # another node on the same file system was faster
            os.unlink(path)

    def orphans(self, path: str) -> list[str]:
        """Return names of folders in `.workers` whose checkpoint was never completed."""
        place = os.path.dirname(path)
        means = {name_of(p) for p in listed(place)} | {name_of(path)}
        names = {os.path.basename(p) for p in listed(os.path.join(place, ".workers"))}
        return sorted(names - means)

    def partials(self, path: str) -> list[str]:
        """Return the unfinished files that killed saves have left next to `path`."""
        return [p for p in listed(os.path.dirname(path)) if _PARTIAL.fullmatch(os.path.basename(p))]


class Entrusted:
    """Store that leaves writing to the user's CheckpointIO plugin: at once or later (asynchronously), here or remotely.

    The workers' files of the previous save are kept: until the new plain file is written, readers use the old one."""

    sealed, kept = False, 2

    def __init__(self, io: CheckpointIO, options: Any) -> None:
        self._io, self._options = io, options

    def write(self, content: dict[str, Any], path: str, identity: str) -> None:
        self._io.save_checkpoint(content, path, storage_options=self._options)

    def settle(self, path: str) -> None:
        pass

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._io.remove_checkpoint(path)

    def orphans(self, path: str) -> list[str]:
        return []  # a plugin's files aren't known here

    partials = orphans


CheckpointStore = Durable | Entrusted
