"""The settings tree: sources, precedence, and errors that say where."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from enginehouse.api.engine_host import engine_config
from enginehouse.engine.engine_config import BatchingConfig, EngineConfig
from enginehouse.settings import DEFAULT_SOURCE, Settings, SettingsError, json_schema

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, path: str = "enginehouse.yaml") -> Path:
    Path(path).write_text(text)
    return Path(path)


def test_defaults_serve_the_default_model_locally() -> None:
    settings = Settings.load()
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8000)
    assert (settings.model.source, settings.model.id) == (DEFAULT_SOURCE, "smollm2")


def test_overrides_beat_environment_beats_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "server: {port: 1, max_n: 2, max_prompts: 3}\nengine: {batching: {static_size: 9, token_budget: 64}}"
    )
    monkeypatch.setenv("ENGINEHOUSE_SERVER__PORT", "11")
    monkeypatch.setenv("ENGINEHOUSE_SERVER__MAX_N", "12")
    monkeypatch.setenv("ENGINEHOUSE_ENGINE__BATCHING__STATIC_SIZE", "8")
    settings = Settings.load(overrides={"server.port": 111, "log.level": None})
    assert (settings.server.port, settings.server.max_n, settings.server.max_prompts) == (111, 12, 3)
    assert (settings.engine.batching.static_size, settings.engine.batching.token_budget) == (8, 64)
    assert settings.log.level == "info"


def test_a_named_file_replaces_the_one_in_the_directory() -> None:
    write("server: {port: 1}")
    assert Settings.load(write("server: {port: 2}", "other.yaml")).server.port == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server:\n  port: 99999", "enginehouse.yaml:2: server.port: should be less than or equal to 65535, not 99999"),
        ("server:\n\n  prot: 1", "enginehouse.yaml:3: server.prot: unknown setting. Did you mean port? Known here: allowed_hosts, api_"),
        ("sever: {}", "enginehouse.yaml:1: sever: unknown setting. Did you mean server?"),
        ("model:\n  precision: int4", "enginehouse.yaml:2: model.precision: should be 'int8' or 'fp32', not \"int4\""),
        (
            "engine:\n  batching:\n    strategy: dynamic",
            "enginehouse.yaml:3: engine.batching.strategy: should be 'one-at-a-time', 'static' or 'continuous'",
        ),
        ("engine:\n  max_queue_wait_s: .nan", "enginehouse.yaml:2: engine.max_queue_wait_s: should be"),
        ("server: 5", "enginehouse.yaml:1: server: should be a section"),
        ("server:\n  port: 1\n  port: 2", "enginehouse.yaml:3: server.port is set twice"),
        ("server: [", "enginehouse.yaml:1:"),
        ("server:\n\tport: 1", "enginehouse.yaml:2:"),
        ("- a", "enginehouse.yaml:1: expected sections"),
        ("server: {cors_origins: [1]}", "enginehouse.yaml:1: server.cors_origins.0: should be a valid string, not 1"),
    ],
)  # fmt: skip
def test_mistakes_in_the_file_name_their_line(text: str, expected: str) -> None:
    write(text)
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert expected in str(caught.value)


def test_every_mistake_is_listed_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    write("server:\n  port: -1")
    monkeypatch.setenv("ENGINEHOUSE_ENGINE__NUM_THREADS", "many")
    with pytest.raises(SettingsError) as caught:
        Settings.load(overrides={"log.level": "loud"})
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "enginehouse.yaml:2",
        "environment ENGINEHOUSE_ENGINE__NUM_THREADS",
        "option log.level",
    ]


def test_unknown_section_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEHOUSE_SERVR__PORT", "1")
    with pytest.raises(SettingsError, match="ENGINEHOUSE_SERVR__PORT: unknown section"):
        Settings.load()


def test_variables_of_other_parts_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEHOUSE_CACHE", "/somewhere")
    assert Settings.load().server.port == 8000


def test_missing_file_is_an_error_when_it_was_named() -> None:
    with pytest.raises(SettingsError, match=r"nothing\.yaml: No such file"):
        Settings.load(Path("nothing.yaml"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_open_address_without_key_is_refused(host: str) -> None:
    with pytest.raises(SettingsError, match="--insecure"):
        Settings.load(overrides={"server.host": host})
    assert Settings.load(overrides={"server.host": host, "server.insecure": True}).server.host == host
    assert (
        Settings.load(overrides={"server.host": host, "server.api_keys": ["long-enough"]}).server.host == host
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert Settings.load(overrides={"server.host": host}).server.host == host


@pytest.mark.parametrize(
    "key", ["", "short", "sevench", "with space", "tab\there!", "schlüssel", "line\nend!", "        "]
)
def test_keys_that_no_header_can_carry_are_refused(key: str) -> None:
    with pytest.raises(SettingsError, match=r"server\.api_keys") as caught:
        Settings.load(overrides={"server.api_keys": ["good-enough", key]})
    assert "printable ASCII" in str(caught.value)
    assert not key.strip() or key not in str(caught.value)


def test_keys_are_never_shown() -> None:
    write("server:\n  api_keys: [secret-one, 17]")
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert "17" not in str(caught.value)
    settings = Settings.load(write("server: {api_keys: [secret-one]}", "b.yaml"))
    assert "secret-one" not in repr(settings) + settings.model_dump_json()


def test_engine_settings_are_the_engines_own() -> None:
    """Same names, same defaults: what the engine can be told, the settings can say."""
    assert engine_config(Settings()) == EngineConfig()
    named = {*Settings().engine.model_dump(), "source", "model_id", "precision"}
    assert named == {field.name for field in msgspec.structs.fields(EngineConfig)}
    batching = {field.name for field in msgspec.structs.fields(BatchingConfig)}
    assert set(Settings().engine.batching.model_dump()) == batching


def test_schema_describes_every_setting() -> None:
    schema = json_schema()
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        for name, prop in section["properties"].items():
            assert "description" in prop or "$ref" in prop, name


def test_shipped_schema_is_current() -> None:
    shipped = json.loads((ROOT / "docs" / "settings.schema.json").read_text())
    assert shipped == json_schema(), "run: python scripts/settings_docs.py"


def test_settings_page_is_current() -> None:
    from scripts.settings_docs import settings_page

    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), (
        "run: python scripts/settings_docs.py"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server:\n  port: yes\n", r":2: server\.port: should be something else than true or false"),
        ("engine:\n  num_threads: true\n", r":2: engine\.num_threads: should be something else"),
        ("server:\n  api_keys: abcdefgh\n", r":2: server\.api_keys: should be a list"),
        ("engine:\n  batching: static\n", r":2: engine\.batching: should be a section .*strategy"),
        ("server: 5\n", r":1: server: should be a section .*port"),
    ],
)
def test_values_of_another_kind_are_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "enginehouse.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        Settings.load(path, {"server.host": "127.0.0.1", "engine.kernels": "auto"})


def test_a_list_in_the_environment_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEHOUSE_SERVER__API_KEYS", "abcdefgh")
    with pytest.raises(SettingsError, match="JSON"):
        Settings.load()
