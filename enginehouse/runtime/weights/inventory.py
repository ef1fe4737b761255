"""What models are in the cache, and removing them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from enginehouse.errors import CorruptModelError, SourceError
from enginehouse.runtime.packed import read_manifest
from enginehouse.runtime.quantization import Precision
from enginehouse.runtime.sources.cache import locked
from enginehouse.runtime.sources.hashes import forget
from enginehouse.runtime.sources.locations import ALIASES, parse_source
from enginehouse.runtime.sources.records import SourceRecord, all_records
from enginehouse.runtime.weights.prepare import packed_dir, packed_version

_HUB_REPOSITORY = "models--"


@dataclass(frozen=True, slots=True)
class PackedCopy:
    """One packed form of a model; `precision` is None when its manifest cannot be read."""

    path: Path
    precision: Precision | None
    num_bytes: int

    @property
    def is_current(self) -> bool:
        """Whether this version of Enginehouse would use it."""
        return self.path.name.endswith(packed_version())


@dataclass(slots=True)
class CachedModel:
    """A model that was fetched, packed, or both."""

    source: str
    """Full form of the source; of packed weights nobody can read, their directory."""
    record: SourceRecord | None = None
    directory: Path | None = None
    """Where the record is; None for a file or directory of the user's own."""
    packed: list[PackedCopy] = field(default_factory=list)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the fetched files that are still there."""
        return sum(path.stat().st_size for path in self.fetched_files() if path.exists())

    @property
    def packed_bytes(self) -> int:
        """Bytes of all packed forms."""
        return sum(copy.num_bytes for copy in self.packed)

    @property
    def alias(self) -> str | None:
        """A short name that means this source."""
        return next((alias for alias, source in ALIASES.items() if source == self.source), None)

    def fetched_files(self) -> list[Path]:
        """The fetched files, wherever they are."""
        if self.record is None or self.directory is None:
            return []
        return [self.directory / file.path for file in self.record.files]


def cached_models() -> list[CachedModel]:
    """Everything in the cache, by source."""
    models = {
        record.source: CachedModel(record.source, record, directory) for directory, record in all_records()
    }
    found = packed_dir().iterdir() if packed_dir().is_dir() else iter(())
    for path in sorted(path for path in found if path.is_dir()):
        source, precision = str(path), None
        try:
            manifest = read_manifest(path)
        except CorruptModelError:
            pass  # listed under its directory, so that it can be seen and removed
        else:
            source, precision = manifest.source, manifest.precision
        num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        models.setdefault(source, CachedModel(source)).packed.append(PackedCopy(path, precision, num_bytes))
    return [models[source] for source in sorted(models)]


def find_cached(text: str) -> CachedModel:
    """The cached model that `text` names: an alias, a source, or a path. Raises `SourceError`.

    The path of a packed directory means that one packed form alone.
    """
    names = {text, ALIASES.get(text, text)}
    if text in ALIASES or text.startswith(("pypi:", "hf:")):
        names.add(str(parse_source(text)))
    else:
        names.add(str(Path(text).expanduser().resolve()))
    for model in cached_models():
        if model.source in names:
            return model
        for copy in model.packed:
            if str(copy.path) in names:
                return CachedModel(model.source, packed=[copy])
    raise SourceError(f"{text!r} is not in the cache; `enginehouse models list` shows what is")


def remove_cached(model: CachedModel) -> None:
    """Remove a model's fetched and packed files. Files of the user's own are never touched.

    A worker that has the packed weights mapped goes on with them. Raises OSError.
    """
    for copy in model.packed:
        with locked(f"packed-{copy.path.name}"):
            shutil.rmtree(copy.path)
    if model.directory is None:
        return
    with locked(f"source-{model.directory.name}"):
        for path in model.fetched_files():
            forget(path)
            if not path.is_relative_to(model.directory):
                _remove_from_hub_cache(path)
        shutil.rmtree(model.directory)


def _remove_from_hub_cache(path: Path) -> None:
    """Remove one file of a snapshot, and its blob unless another snapshot has it too."""
    repository = next((parent for parent in path.parents if parent.name.startswith(_HUB_REPOSITORY)), None)
    if repository is None or not path.exists():
        return
    blob = path.resolve()
    path.unlink()
    snapshots = repository / "snapshots"
    if not any(other.resolve() == blob for other in snapshots.rglob("*") if other.is_symlink()):
        blob.unlink(missing_ok=True)
    if not any(other.is_file() for other in snapshots.rglob("*")):
        shutil.rmtree(repository)
