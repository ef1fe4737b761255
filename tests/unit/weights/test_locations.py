"""How models are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginehouse.errors import SourceError
from enginehouse.runtime.sources import ALIASES, HubSource, LocalSource, PyPISource, Source, parse_source
from enginehouse.runtime.sources.locations import source_key


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pypi:pkg", PyPISource("pkg", None, None)),
        ("pypi:Some_Pkg.name==1.2.3", PyPISource("some-pkg-name", "1.2.3", None)),
        ("pypi:pkg==1.0#a/b.gguf", PyPISource("pkg", "1.0", "a/b.gguf")),
        ("pypi:pkg#dir/", PyPISource("pkg", None, "dir")),
        ("hf:Org/Name-1.5B", HubSource("Org/Name-1.5B", None, None)),
        ("hf:o/n@v1", HubSource("o/n", "v1", None)),
        ("hf:o/n@refs/pr/19", HubSource("o/n", "refs/pr/19", None)),
        ("hf:o/n@main/sub/m.Q4_K_M.gguf", HubSource("o/n", "main", "sub/m.Q4_K_M.gguf")),
        ("hf:o/n@refs/pr/3/m.gguf", HubSource("o/n", "refs/pr/3", "m.gguf")),
        ("hf:o/n/m.gguf", HubSource("o/n", None, "m.gguf")),
    ],
)
def test_forms(text: str, expected: Source) -> None:
    source = parse_source(text)
    assert source == expected
    assert parse_source(str(source)) == source


def test_the_default_model_has_a_short_name() -> None:
    source = parse_source("smollm2")
    assert source == parse_source(ALIASES["smollm2"])
    assert str(source) == ALIASES["smollm2"]
    assert isinstance(source, PyPISource)
    assert source.is_pinned


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    assert parse_source(str(tmp_path / "model.gguf")) == LocalSource(tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    assert parse_source("model.gguf") == LocalSource(tmp_path / "model.gguf")
    assert parse_source(".") == LocalSource(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "unknown model ''.*pypi:PACKAGE.*hf:ORG/NAME.*smollm2"),
        ("gpt-9", "unknown model 'gpt-9'"),
        ("/no/such/file.gguf", "unknown model"),
        ("Qwen/Qwen3-0.6B", "named hf:Qwen/Qwen3-0.6B"),
        ("pypi:", "not of the form pypi:"),
        ("pypi:--index-url=http://evil", "not of the form pypi:"),
        ("pypi:pkg>=1", "not of the form pypi:"),
        ("pypi:pkg#../../etc/passwd", "no relative path"),
        ("pypi:pkg#/etc/passwd", "no relative path"),
        ("hf:name", "not of the form hf:"),
        ("hf:a/b@", "not of the form hf:"),
        ("hf:a/b/../../x.gguf", "no relative path"),
        ("hf:a/b/model.safetensors", "is no .gguf file"),
    ],
)
def test_what_is_no_source_is_told_the_forms(text: str, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        parse_source(text)


def test_keys_are_file_names_and_differ() -> None:
    texts = [
        "pypi:a",
        "pypi:a==1",
        "pypi:a==1#x.gguf",
        "pypi:a==1#y.gguf",
        "hf:a/b",
        "hf:a/b@c",
        "hf:a/b/c.gguf",
    ]
    texts.append("hf:" + "a" * 90 + "/" + "b" * 90)
    keys = set()
    for text in texts:
        source = parse_source(text)
        assert not isinstance(source, LocalSource)
        key = source_key(source)
        assert "/" not in key
        assert len(key) < 100
        keys.add(key)
    assert len(keys) == len(texts)
