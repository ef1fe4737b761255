"""What the cache knows of each fetched source: which files, how long, from where. Read at every start."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final

import msgspec

from enginehouse.runtime.sources.cache import cache_dir, write_atomically
from enginehouse.runtime.sources.hashes import file_sha256

logger = logging.getLogger(__name__)

RECORD_FILE: Final = "source.json"


class FetchedFile(msgspec.Struct, frozen=True):
    """One file of a fetched source."""

    path: str
    """Absolute, or relative to the record's directory."""
    num_bytes: int
    sha256: str | None = None
    """None when the publisher gave another kind of hash, which was checked when the file was fetched."""


class SourceRecord(msgspec.Struct, frozen=True):
    """A fetched source: `source.json` in its directory of the cache."""

    source: str
    """In its full form, as `str(source)` gives it."""
    version: str
    """Package version or commit that was fetched."""
    model: str
    """The .gguf file or the directory to open; absolute, or relative to the record's directory."""
    files: list[FetchedFile]
    fetched_at: float = msgspec.field(default_factory=time.time)
    """Seconds since 1970."""


def sources_dir() -> Path:
    """Where fetched sources are."""
    return cache_dir() / "sources"


def read_record(directory: Path) -> SourceRecord | None:
    """The record in `directory`, or None when there is none that can be read."""
    try:
        return msgspec.json.decode((directory / RECORD_FILE).read_bytes(), type=SourceRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def write_record(directory: Path, record: SourceRecord) -> None:
    """Store the record; what it lists must be there already."""
    write_atomically(directory / RECORD_FILE, msgspec.json.format(msgspec.json.encode(record), indent=2))


def usable_model(directory: Path) -> Path | None:
    """The model of the source fetched into `directory`, if all its files are still what was fetched.

    A file is read again only when its times say that somebody has written to it.
    """
    record = read_record(directory)
    if record is None:
        return None
    for file in record.files:
        path = directory / file.path
        try:
            if path.stat().st_size != file.num_bytes:
                return None
            if file.sha256 is not None and file_sha256(path) != file.sha256:
                logger.warning("%s is damaged: fetching %s anew", path, record.source)
                return None
        except OSError:
            return None
    return directory / record.model


def all_records() -> list[tuple[Path, SourceRecord]]:
    """Directory and record of everything that has been fetched, by source."""
    found = []
    for path in sources_dir().glob(f"*/{RECORD_FILE}"):
        record = read_record(path.parent)
        if record is not None:
            found.append((path.parent, record))
    return sorted(found, key=lambda item: item[1].source)
