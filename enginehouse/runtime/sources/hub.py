"""Models on the Hugging Face hub, or on any server that speaks its protocol (`HF_ENDPOINT`).

The huggingface_hub library fetches into its own cache, which other programs share. We choose the files, pin the
commit first, so that all files are of one revision, and compare every file with the hash the hub lists for it
(the library compares sizes only).
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from tqdm.std import tqdm  # type: ignore[import-untyped]

from enginehouse.errors import ChecksumError, SourceError, UnsupportedModelError
from enginehouse.runtime.sources.cache import Progress, describe_storage_error, format_bytes
from enginehouse.runtime.sources.hashes import compute_sha256, forget, git_blob_sha1
from enginehouse.runtime.sources.locations import HubSource
from enginehouse.runtime.sources.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    SENTENCE_FILES,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
    pickled_only,
    weight_files,
)
from enginehouse.runtime.sources.records import FetchedFile, SourceRecord, write_record

INFO_TIMEOUT_S: Final = 20.0


def fetch_hub(source: HubSource, directory: Path, progress: Progress) -> Path:
    """Fetch `source` into huggingface_hub's cache, note it in `directory`, and return the model's path.

    The caller holds the lock of `directory`. Raises `SourceError`, `ChecksumError`, `UnsupportedModelError`.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    with _hub_errors(source, endpoint):
        question = f"asking {endpoint} for {source.repository}"
        progress(question, 0.0)
        info = HfApi(endpoint=endpoint).model_info(
            source.repository, revision=source.revision, files_metadata=True, timeout=INFO_TIMEOUT_S
        )
        progress(question, 1.0)
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
        if info.sha is None:
            raise SourceError(f"{endpoint} does not tell the commit of {source}; is it a Hugging Face hub?")
        fetcher = _Fetcher(source, endpoint, info.sha, siblings, progress)
        paths = fetcher.fetch(choose_files(source, list(siblings)))
        if INDEX_FILE in paths:
            snapshot = paths[INDEX_FILE].parent
            # The index's own check wants the shards to be there: fetch by name pattern, then let it look.
            shards = [name for name in siblings if PurePosixPath(name).match("model-*.safetensors")]
            paths |= fetcher.fetch(shards)
            weight_files(snapshot)
    model = paths[source.file] if source.file else paths[CONFIG_FILE].parent
    files = [FetchedFile(str(path), path.stat().st_size) for path in paths.values()]
    write_record(directory, SourceRecord(str(source), info.sha, str(model), files))
    return model


def hub_cache_dir() -> Path:
    """huggingface_hub's cache, shared with other programs."""
    return Path(os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE)


def choose_files(source: HubSource, names: list[str]) -> list[str]:
    """Which files of a repository to fetch (the shards of a sharded model come after its index).

    Raises `SourceError` or `UnsupportedModelError` that says what the repository has.
    """
    ggufs = [name for name in names if name.endswith(".gguf")]
    if source.file is not None:
        if source.file not in names:
            listing = ", ".join(ggufs[:12]) if ggufs else "no .gguf files"
            raise SourceError(f"{source.repository} has no {source.file}; it has {listing}")
        return [source.file]
    weights = [name for name in (INDEX_FILE, WEIGHTS_FILE) if name in names][:1]
    if not weights or CONFIG_FILE not in names:
        if ggufs:
            raise SourceError(
                f"{source} has GGUF files; name one: {source}/{ggufs[0]} (all: {', '.join(ggufs[:12])})"
            )
        pickles = [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
        if pickles:
            raise UnsupportedModelError(pickled_only(source.repository, pickles[0]))
        raise SourceError(
            f"{source} has no {WEIGHTS_FILE} with a {CONFIG_FILE}: it is no model Enginehouse can read"
        )
    small = (*TOKENIZER_FILES, *SENTENCE_FILES)
    return [CONFIG_FILE, *weights, *(name for name in small if name in names)]


class _Fetcher:
    """Downloads files of one commit and checks them."""

    def __init__(
        self,
        source: HubSource,
        endpoint: str,
        commit: str,
        siblings: dict[str, RepoSibling],
        progress: Progress,
    ) -> None:
        self._source = source
        self._endpoint = endpoint
        self._commit = commit
        self._siblings = siblings
        self._progress = progress

    def fetch(self, names: list[str]) -> dict[str, Path]:
        """Name -> path of each file, in the snapshot directory of the commit."""
        total_bytes = sum(self._siblings[name].size or 0 for name in names)
        what = f"downloading {self._source} ({format_bytes(total_bytes)})"
        done_bytes = 0
        paths = {}
        for name in names:
            bar = _progress_bar(self._progress, what, done_bytes, max(1, total_bytes))
            path = Path(
                hf_hub_download(
                    self._source.repository,
                    name,
                    revision=self._commit,
                    cache_dir=hub_cache_dir(),
                    endpoint=self._endpoint,
                    tqdm_class=bar,
                )
            )
            self._check(name, path)
            paths[name] = path
            done_bytes += self._siblings[name].size or 0
        self._progress(what, 1.0)
        return paths

    def _check(self, name: str, path: Path) -> None:
        sibling = self._siblings[name]
        if sibling.lfs is not None:
            matches = compute_sha256(path) == sibling.lfs.sha256
        elif sibling.blob_id is not None:
            matches = git_blob_sha1(path) == sibling.blob_id
        else:
            raise ChecksumError(
                f"{self._endpoint} lists no hash for {name} of {self._source}; it cannot be checked"
            )
        if not matches:
            # The file must go, or every later try would find it in the cache and fail again.
            forget(path)
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise ChecksumError(
                f"{self._source}: {name} does not have the hash that the hub lists; try again"
            )


def _progress_bar(progress: Progress, what: str, before_bytes: int, total_bytes: int) -> type[Any]:
    """A tqdm that shows nothing and reports to `progress`."""

    class ReportingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"file": io.StringIO(), "disable": False}
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            progress(what, min(1.0, (before_bytes + self.n) / total_bytes))
            return None

    return ReportingBar


@contextlib.contextmanager
def _hub_errors(source: HubSource, endpoint: str) -> Iterator[None]:
    """Turn the library's errors into `SourceError`s that say what to do."""
    try:
        yield
    except GatedRepoError as error:
        raise SourceError(
            f"{source.repository} is gated: accept its terms at {endpoint}/{source.repository}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise SourceError(
            f"{endpoint} has no model {source.repository!r}, or it is private: check the name, and for a private "
            "one log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{source.repository} has no revision {source.revision!r}") from error
    except HfHubHTTPError as error:
        raise SourceError(
            f"{endpoint} answered {error.response.status_code} for {source}; try again later"
        ) from error
    except (httpx2.HTTPError, EntryNotFoundError, ConnectionError) as error:
        raise SourceError(
            f"cannot fetch {source} from {endpoint} ({str(error).splitlines()[0] or type(error).__name__}). Check "
            "the network, the proxy settings and HF_ENDPOINT, or give a directory or file on this machine"
        ) from error
    except OSError as error:
        raise describe_storage_error(error, hub_cache_dir()) or SourceError(
            f"the download of {source} broke off ({str(error).splitlines()[0]}); try again"
        ) from error
