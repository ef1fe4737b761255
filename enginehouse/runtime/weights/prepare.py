"""From the name of a model to packed weights on this machine: fetched once, packed once, found again at once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from enginehouse.errors import CorruptModelError, EnginehouseError
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.models import architecture_for
from enginehouse.runtime.ops.layout import LAYOUT_VERSION
from enginehouse.runtime.packed import FORMAT_VERSION, MANIFEST_FILE, Manifest, PackedModel, read_manifest
from enginehouse.runtime.quantization import Precision
from enginehouse.runtime.sources import (
    LocalSource,
    Progress,
    cache_dir,
    fetch_source,
    ignore_progress,
    parse_source,
)
from enginehouse.runtime.sources.cache import locked, publish, staging, storage_errors
from enginehouse.runtime.sources.model_files import hash_source

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model a worker can open."""

    path: Path
    """The packed directory, for `open_packed`."""
    config: ModelConfig
    precision: Precision
    source: str
    """Full form of the source it was made from."""
    source_path: Path
    """The .gguf file or directory it was packed from."""
    packed_bytes: int


def prepare_model(
    source: str, precision: Precision, progress: Progress = ignore_progress, *, refresh: bool = False
) -> PreparedModel:
    """Fetch the source if needed, pack it if needed, and say where the packed model is.

    `progress` is called with what is done and the fraction of it that is done. Packed weights that are damaged,
    half written or made by another version are made anew. `refresh` looks for a newer version of a source that
    does not name one. Raises `SourceError`, `ChecksumError`, `CorruptModelError` (of the source) or
    `UnsupportedModelError`.
    """
    parsed = parse_source(source)
    source_path = fetch_source(parsed, progress, refresh=refresh)
    if isinstance(parsed, LocalSource) and (source_path / MANIFEST_FILE).is_file():
        return _prepared(source_path, _verified(source_path), str(parsed), source_path)
    with storage_errors(cache_dir()):
        source_hash = hash_source(source_path, lambda done: progress(f"checking {source_path.name}", done))
    name = packed_name(source_hash, precision)
    path = packed_dir() / name
    manifest = _usable(path)
    if manifest is None:
        with locked(f"packed-{name}", progress):
            # Another process may have packed it while this one waited for the lock.
            manifest = _usable(path, log=True)
            if manifest is None:
                manifest = _pack_into(path, source_path, str(parsed), precision, progress)
    return _prepared(path, manifest, str(parsed), source_path)


def packed_dir() -> Path:
    """Where packed models are."""
    return cache_dir() / "packed"


def packed_name(source_hash: str, precision: Precision) -> str:
    """The directory name of a packed model."""
    return f"{source_hash[:24]}-{precision}{packed_version()}"


def packed_version() -> str:
    """The end of the directory names of packed models that this version can use."""
    return f"-v{FORMAT_VERSION}.{LAYOUT_VERSION}"


def _prepared(path: Path, manifest: Manifest, source: str, source_path: Path) -> PreparedModel:
    size_bytes = manifest.weights_bytes + sum(entry.num_bytes for entry in manifest.files.values())
    return PreparedModel(path, manifest.config, manifest.precision, source, source_path, size_bytes)


def _pack_into(
    path: Path, source_path: Path, source: str, precision: Precision, progress: Progress
) -> Manifest:
    from enginehouse.runtime.weights.checkpoint import open_checkpoint
    from enginehouse.runtime.weights.packer import pack

    with storage_errors(path), staging(path) as stage:
        checkpoint = open_checkpoint(source_path)
        try:
            manifest = pack(checkpoint, stage, precision, source=source, progress=progress)
        finally:
            checkpoint.close()
        publish(stage, path)
    return manifest


def _usable(path: Path, *, log: bool = False) -> Manifest | None:
    """The manifest of a packed model that is whole and up to date, or None."""
    if not path.exists():
        return None
    try:
        return _verified(path)
    except EnginehouseError as error:
        if log:
            logger.warning("packed weights are made anew: %s", error)
        return None


def _verified(path: Path) -> Manifest:
    """Check every byte of a packed model. Raises `CorruptModelError`."""
    from enginehouse.runtime.weights.packer import file_entry, table_matches

    manifest = read_manifest(path)
    for name, expected in manifest.files.items():
        if not (path / name).is_file() or file_entry(path / name) != expected:
            raise CorruptModelError(f"{path / name} is missing or damaged")
    architecture = architecture_for(manifest.hf_config)
    is_current = (
        manifest.format_version == FORMAT_VERSION
        and manifest.layout_version == LAYOUT_VERSION
        and architecture.config_from_hf(manifest.hf_config) == manifest.config
        and table_matches(manifest, architecture.tensors(manifest.config))
    )
    if not is_current:
        raise CorruptModelError(f"{path} was packed by another version of Enginehouse")
    PackedModel(path, manifest).verify()
    return manifest
