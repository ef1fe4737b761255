"""By which names a server answers: pages that point their own name at this machine are not heard."""

from __future__ import annotations

import httpx2
import pytest
from pydantic import SecretStr

from enginehouse.api.app import create_app
from enginehouse.api.hosts import host_name
from enginehouse.settings import LogSettings, ModelSettings, ServerSettings, Settings
from tests.http.scripted_engine import ScriptedEngine
from tests.http.serving import Server
from tests.http.test_errors import check_error
from tests.http.test_states_and_failures import running

LOCAL = ["localhost", "localhost:8000", "LocalHost:1", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000"]
FOREIGN = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example#localhost",
    "127.0.0.2", "[::2]", "[::1].evil.example:1", "", "localhost@evil.example", "evil.example:localhost",
]  # fmt: skip
KEY = "long-enough-key"


async def status(server: ServerSettings, host: str, path: str = "/version") -> httpx2.Response:
    async def start(_config: object, _on_progress: object) -> object:
        return ScriptedEngine()

    settings = Settings(model=ModelSettings(id="scripted"), log=LogSettings(access=False), server=server)
    headers = {"host": host, "authorization": f"Bearer {KEY}"}
    async with running(create_app(settings, start_engine=start)) as client:  # type: ignore[arg-type]
        return await client.get(path, headers=headers)


@pytest.mark.parametrize("host", LOCAL)
async def test_local_names_are_answered(host: str) -> None:
    assert (await status(ServerSettings(), host)).status_code == 200
    assert (await status(ServerSettings(allowed_hosts=("llm.example",)), host)).status_code == 200


@pytest.mark.parametrize("path", ["/version", "/health", "/ready", "/v1/models", "/no/such/route"])
@pytest.mark.parametrize("host", FOREIGN)
async def test_other_names_are_refused_on_every_path(host: str, path: str) -> None:
    answer = await status(ServerSettings(), host, path)
    assert "server.allowed_hosts" in check_error(answer, 403, code="host_not_allowed")


@pytest.mark.parametrize(
    ("server", "allowed", "refused"),
    [
        (ServerSettings(allowed_hosts=("llm.example",)), ["LLM.example:9", "llm.example."], ["evil.example"]),
        (ServerSettings(allowed_hosts=("*",)), ["evil.example"], []),
        (ServerSettings(host="127.8.8.8"), ["127.8.8.8:80", "localhost"], ["evil.example"]),
        (ServerSettings(host="0.0.0.0", insecure=True), ["10.0.0.7:8000", "llm.example"], []),
        (ServerSettings(api_keys=(SecretStr(KEY),)), ["llm.example"], []),
        (
            ServerSettings(host="0.0.0.0", insecure=True, allowed_hosts=("llm.example",)),
            ["llm.example", "localhost"],
            ["evil.example"],
        ),
    ],
)
async def test_settings_decide(server: ServerSettings, allowed: list[str], refused: list[str]) -> None:
    for host in allowed:
        assert (await status(server, host)).status_code == 200, host
    for host in refused:
        check_error(await status(server, host), 403, code="host_not_allowed")


def test_names_come_without_port_and_in_lower_case() -> None:
    assert [host_name(host) for host in ("A.B:1", "a.b.", "[::1]:5", " x ")] == ["a.b", "a.b", "[::1]", "x"]


def test_a_real_server_checks_the_name(server: Server) -> None:
    answer = server.post("/v1/completions", {"prompt": "a"}, headers={"host": "evil.example"})
    check_error(answer, 403, code="host_not_allowed")
