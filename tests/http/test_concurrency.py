"""Two hundred clients at once: each gets what a lone run gives it, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import psutil
import pytest

from tests.http.conftest import tiny_overrides
from tests.http.serving import Server, sse_frames
from tests.http.test_errors import check_error

NUM_CLIENTS = 200
BLOCK_BYTES = 32 * 2 * 2 * 2 * 16 * 2
"""Tokens, keys and values, layers, heads, width, bytes of fp16."""


@dataclass
class Client:
    """What one client does: its request, and after how many frames it leaves (None: it stays)."""

    body: dict[str, Any]
    leaves_after: int | None
    delay_s: float


def make_clients(seed: int) -> list[Client]:
    rng = random.Random(seed)
    clients = []
    for _ in range(NUM_CLIENTS):
        shared = rng.choice(
            ["", "a beginning that several of them share, long enough for two blocks of the cache. "]
        )
        body: dict[str, Any] = {
            "prompt": shared + "".join(rng.choice("abcdefgh the é😀") for _ in range(rng.randint(1, 60))),
            "max_tokens": rng.randint(1, 120),
            "temperature": rng.choice([0, 0, 0.7, 1.4]),
            "seed": rng.randint(0, 2**40),
            "n": rng.choice([1, 1, 1, 2, 3]),
            "ignore_eos": rng.random() < 0.7,
            "stream": rng.random() < 0.6,
        }
        if rng.random() < 0.3:
            body["stop"] = rng.sample(["a", "e", "th", "�", "1", " "], 2)
        if rng.random() < 0.2:
            body["repetition_penalty"] = 1.2
        if rng.random() < 0.2:
            body["logit_bias"] = {str(rng.randint(3, 319)): rng.uniform(-20, 20)}
        leaves = rng.randint(0, 8) if rng.random() < 0.25 else None
        if leaves is not None:  # long enough that there is something to leave
            body = {**body, "max_tokens": 300, "ignore_eos": True}
            body.pop("stop", None)
        clients.append(Client(body, leaves, rng.random() * 0.1))
    return clients


def answer_of(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(choice["text"], choice["finish_reason"]) for choice in body["choices"]]


async def run(http: httpx2.AsyncClient, client: Client) -> list[tuple[str, str]] | None:
    """The client's answer; None when it left."""
    await asyncio.sleep(client.delay_s)
    if client.leaves_after is not None:
        await leave_early(http, client)
        return None
    answer = await http.post("/v1/completions", json=client.body)
    assert answer.status_code == 200, answer.text
    if not client.body["stream"]:
        return answer_of(answer.json())
    texts, reasons = [""] * client.body["n"], [""] * client.body["n"]
    for frame in sse_frames(answer.text):
        for choice in frame["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or ""
    return list(zip(texts, reasons, strict=True))


async def leave_early(http: httpx2.AsyncClient, client: Client) -> None:
    if not client.body["stream"]:
        with_deadline = asyncio.timeout(0.02 * (client.leaves_after or 0) + 0.001)
        try:
            async with with_deadline:
                await http.post("/v1/completions", json=client.body)
        except TimeoutError:
            pass
        return
    async with http.stream("POST", "/v1/completions", json=client.body) as answer:
        seen = 0
        async for _ in answer.aiter_lines():
            seen += 1
            if seen > 2 * (client.leaves_after or 0):
                return


async def run_all(url: str, clients: list[Client], *, at_once: bool) -> list[list[tuple[str, str]] | None]:
    limits = httpx2.Limits(max_connections=NUM_CLIENTS + 10)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        if at_once:
            return list(await asyncio.gather(*(run(http, client) for client in clients)))
        return [
            None if client.leaves_after is not None else await run(http, Client(client.body, None, 0))
            for client in clients
        ]


def descriptors(server: Server) -> int:
    return sum(process.num_fds() for process in family(server))


def family(server: Server) -> list[psutil.Process]:
    parent = psutil.Process(server.pid)
    return [parent, *parent.children(recursive=True)]


def resident_bytes(server: Server) -> int:
    return sum(process.memory_info().rss for process in family(server))


def settle(server: Server, num_descriptors: int) -> None:
    """Until the server is idle and closed connections are gone from its descriptors."""
    server.wait_idle(20)
    deadline = time.monotonic() + 10
    while descriptors(server) > num_descriptors and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.fixture(scope="module")
def crowd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Room for everybody in the queue, and a cache too small for all that run: some are preempted."""
    directory = tmp_path_factory.mktemp("crowd")
    options = {"engine__max_waiting": 1000, "engine__kv_cache_bytes": 24 * BLOCK_BYTES}
    running = Server(tiny_overrides(directory, **options), directory / "log").start()
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def test_everybody_gets_their_own_answer_and_nothing_leaks(crowd_server: Server) -> None:
    server = crowd_server
    asyncio.run(run_all(server.url, make_clients(0), at_once=True))  # caches of the process fill once
    server.wait_idle(20)
    time.sleep(1)
    num_descriptors = descriptors(server)
    memory = resident_bytes(server)
    tasks = server.metric("enginehouse_event_loop_tasks")
    preempted = server.metric("enginehouse_preemptions_total")
    hits = server.metric("enginehouse_prefix_hit_tokens_total")
    left = server.metric("enginehouse_requests_total", status="499")
    for seed in (1, 2):
        clients = make_clients(seed)
        together = asyncio.run(run_all(server.url, clients, at_once=True))
        settle(server, num_descriptors)
        alone = asyncio.run(run_all(server.url, clients, at_once=False))
        for client, crowded, lone in zip(clients, together, alone, strict=True):
            assert crowded == lone, json.dumps(client.body)
    settle(server, num_descriptors)
    assert descriptors(server) <= num_descriptors
    assert server.metric("enginehouse_event_loop_tasks") <= tasks
    assert resident_bytes(server) < memory + 30 * 2**20
    # What the test is about did happen.
    assert server.metric("enginehouse_preemptions_total") > preempted
    assert server.metric("enginehouse_prefix_hit_tokens_total") > hits
    assert server.metric("enginehouse_requests_total", status="499") >= left + 10
    assert server.metric("enginehouse_worker_restarts_total") == 0
    assert server.get("/health").json()["status"] == "ok"
    assert not [line for line in server.log_lines() if line["level"] == "error"]


def test_queue_full(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Beyond what can run and wait, clients are told to come back, at once; the others are served."""
    directory = tmp_path_factory.mktemp("full")
    options = {"engine__max_waiting": 4, "engine__batching__max_sequences": 2, "engine__kernels": "numpy"}
    server = Server(tiny_overrides(directory, **options), directory / "log").start().wait_ready()

    async def crowd() -> list[httpx2.Response]:
        body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
            return list(await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(20))))

    try:
        answers = asyncio.run(crowd())
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) == 14
        assert sum(answer.status_code == 200 for answer in answers) == 6
        for answer in refused:
            assert answer.json()["error"]["code"] == "queue_full"
            assert 1 <= int(answer.headers["retry-after"]) <= 120
        for route, body, param, number in (
            ("/v1/completions", {"prompt": ["a"] * 5, "n": 2}, "n", 10),
            ("/v1/completions", {"prompt": ["a"] * 7}, "prompt", 7),
            ("/generate", {"prompts": ["a"] * 7}, "prompts", 7),
        ):
            message = check_error(server.post(route, {**body, "max_tokens": 1}), 400, param)
            assert f"{number} sequences" in message
            assert "at most 6" in message
        server.wait_idle()
        assert (
            server.post("/v1/completions", {"prompt": ["a"] * 3, "n": 2, "max_tokens": 1}).status_code == 200
        )
    finally:
        server.stop()
