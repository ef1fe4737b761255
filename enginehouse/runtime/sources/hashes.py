"""SHA-256 of files, remembered: a file whose size and times have not changed is not read again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginehouse.runtime.sources.cache import cache_dir, write_atomically

CHUNK_BYTES = 1 << 20

logger = logging.getLogger(__name__)


def file_sha256(path: Path, progress: Callable[[float], None] | None = None) -> str:
    """Hex SHA-256 of a file, from the note a former call left if the file is still the same.

    `progress` gets the fraction done while the file is really read. Raises OSError when it cannot be.
    """
    resolved = path.resolve()
    status = resolved.stat()
    identity = {
        "path": str(resolved),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }
    note_path = _note_path(resolved)
    note = _read_note(note_path)
    if all(note.get(key) == value for key, value in identity.items()) and isinstance(note.get("sha256"), str):
        return str(note["sha256"])
    digest = compute_sha256(resolved, progress)
    # Bytes that changed while they were read must not be remembered under the old times.
    if resolved.stat().st_mtime_ns == status.st_mtime_ns:
        try:
            write_atomically(note_path, json.dumps(identity | {"sha256": digest}).encode())
        except OSError as error:
            # A full disk or a read-only image still serves what is packed; it costs this hash at every start.
            logger.info("the hash of %s is not remembered: %s", resolved, error)
    return digest


def compute_sha256(path: Path, progress: Callable[[float], None] | None = None) -> str:
    """Hex SHA-256 of a file's present bytes."""
    digest = hashlib.sha256()
    size_bytes = max(1, path.stat().st_size)
    done_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            if progress is not None:
                progress(min(1.0, done_bytes / size_bytes))
    return digest.hexdigest()


def git_blob_sha1(path: Path) -> str:
    """Git's object id of a file: what the hub lists for files that are not in large file storage."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def forget(path: Path) -> None:
    """Drop what is remembered of a file."""
    _note_path(path.resolve()).unlink(missing_ok=True)


def _note_path(resolved: Path) -> Path:
    return cache_dir() / "hashes" / f"{hashlib.sha256(os.fsencode(resolved)).hexdigest()[:32]}.json"


def _read_note(note_path: Path) -> dict[str, Any]:
    try:
        note = json.loads(note_path.read_bytes())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}
