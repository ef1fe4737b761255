"""The cache directory: where it is, how files get into it whole or not at all, and locks between processes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from enginehouse.errors import SourceError

CACHE_VARIABLE = "ENGINEHOUSE_CACHE"
ABANDONED_S = 24 * 3600.0

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done, 0 to 1, of that one thing."""


def cache_dir() -> Path:
    """`$ENGINEHOUSE_CACHE`, or `enginehouse` in the user's cache directory."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "enginehouse"


def ignore_progress(what: str, fraction: float) -> None:
    """A `Progress` that shows nothing."""


def slug(text: str) -> str:
    """`text` as a file name: anything but letters, digits, dot, dash and underscore becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")


@contextlib.contextmanager
def locked(name: str, progress: Progress = ignore_progress) -> Iterator[None]:
    """Hold the lock `name` among all processes that share the cache; says so when it has to wait.

    The operating system drops the lock of a process that dies.
    """
    from filelock import FileLock, Timeout

    path = cache_dir() / "locks" / f"{slug(name)}.lock"
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting = "waiting for another process that prepares the same model"
            progress(waiting, 0.0)
            lock.acquire()
            progress(waiting, 1.0)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def staging(destination: Path) -> Iterator[Path]:
    """A temporary directory beside `destination`; what is left in it afterwards is removed.

    Also removes what killed processes left there before, for `destination` or more than a day ago for another, so it
    may be used only under a lock for `destination`.
    """
    parent, prefix = destination.parent, f".incomplete-{destination.name}."
    with storage_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for leftover in parent.glob(".incomplete-*"):
            if leftover.name.startswith(prefix) or _age_s(leftover) > ABANDONED_S:
                shutil.rmtree(leftover, ignore_errors=True)
        # Not tempfile: its names are private to this user, and a cache may be shared.
        path = parent / f"{prefix}{uuid.uuid4().hex[:12]}"
        path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raise `SourceError` when `directory`'s disk has less than `needed_bytes` free."""
    if shutil.disk_usage(directory).free < needed_bytes:
        raise describe_disk_full(directory.parent, needed_bytes)


def _age_s(path: Path) -> float:
    """Seconds since something in a directory was made or removed; 0 when it has just gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def publish(staged: Path, destination: Path) -> None:
    """Put a finished staging directory in its place in one step; a damaged one that is there goes away."""
    flush_directory(staged)
    if destination.exists():
        doomed = destination.with_name(f".incomplete-{destination.name}.{uuid.uuid4().hex[:12]}")
        destination.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    staged.rename(destination)
    flush_directory(destination.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file so that readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".incomplete-{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def flush_directory(path: Path) -> None:
    """Make a directory's entries durable, where the operating system offers that."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a place without permission and the like into a `SourceError` that says what to do."""
    try:
        yield
    except OSError as error:
        described = describe_storage_error(error, path)
        if described is None:
            raise
        raise described from error


def describe_storage_error(error: OSError, path: Path) -> SourceError | None:
    """The `SourceError` of an OSError that is about storage, or None for any other."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return describe_disk_full(path)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENOENT):
        return SourceError(
            f"cannot use {error.filename or path}: {error.strerror}. Check its permissions; {CACHE_VARIABLE} chooses "
            "another directory for the cache"
        )
    return None


def describe_disk_full(path: Path, needed_bytes: int | None = None) -> SourceError:
    """The error of a disk without the space for `path`, of which `needed_bytes` may be known."""
    if needed_bytes is None:
        problem = f"no space left for {path}"
    else:
        problem = f"{format_bytes(needed_bytes)} are needed for {path}, and {_free(path)} are free"
    return SourceError(
        f"the disk is full: {problem}. Free some space (`enginehouse models rm` removes models) or set "
        f"{CACHE_VARIABLE} to a directory on another disk"
    )


def _free(path: Path) -> str:
    for candidate in (path, *path.parents):
        if candidate.exists():
            return format_bytes(shutil.disk_usage(candidate).free)
    return "unknown space"


def format_bytes(num_bytes: float) -> str:
    """For people: 98.4 MB (decimal units, as download sizes are given)."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
