"""`/v1/embeddings` and `/v1/rerank` against real servers: shapes, refusals, order, the lazy load, leaving clients."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import signal
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import psutil
import pytest

from enginehouse.api.encoder_host import EncoderHost, Encoders
from enginehouse.engine.encoder_config import EncoderEngineConfig
from enginehouse.errors import (
    InvalidRequestError,
    ModelLoadFailedError,
    ModelLoadingError,
    ModelNotFoundError,
    ShuttingDownError,
    SourceError,
)
from enginehouse.settings import EmbeddingSettings, RerankSettings, Settings, SettingsError
from tests.http.conftest import TINY, tiny_overrides
from tests.http.serving import Server
from tests.http.test_framing import RawConnection
from tests.support.tiny_encoders import DATA, QUERY, TEXTS, encoder_named, write_tiny_encoder

EMBEDDER, RERANKER = "tiny-embedder", "tiny-reranker"
DIMENSIONS, MAX_INPUT = 48, 64


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("encoders")
    sources = {
        name: str(write_tiny_encoder(encoder_named(name), directory / name))
        for name in ("bert-mean-norm", "bert-cross")
    }
    overrides = tiny_overrides(
        directory,
        embedding__source=sources["bert-mean-norm"],
        embedding__id=EMBEDDER,
        rerank__source=sources["bert-cross"],
        rerank__id=RERANKER,
    )
    running = Server(overrides, directory / "log").start()
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def embed(server: Server, given: Any, **fields: Any) -> list[list[float]]:
    answer = server.post("/v1/embeddings", {"input": given, **fields})
    assert answer.status_code == 200, answer.text
    return [item["embedding"] for item in answer.json()["data"]]


def workers(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.pid).children()
    return [child for child in children if "enginehouse.engine.encoder_worker" in child.cmdline()]


# The first test here: nothing has been asked of the server yet.
def test_the_first_requests_share_one_load(encoders: Server) -> None:
    listed = {model["id"]: model for model in encoders.get("/v1/models").json()["data"]}
    assert list(listed) == [TINY, EMBEDDER, RERANKER]
    assert (listed[EMBEDDER]["state"], listed[EMBEDDER]["max_model_len"]) == ("unloaded", None)
    assert encoders.metric("enginehouse_model_state", model=EMBEDDER, state="UNLOADED") == 1
    assert workers(encoders) == []
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: embed(encoders, TEXTS), range(8)))
    assert all(result == results[0] for result in results)
    assert len(workers(encoders)) == 1
    model = encoders.get(f"/v1/models/{EMBEDDER}").json()
    assert (model["state"], model["task"], model["max_model_len"]) == ("ready", "embed", MAX_INPUT)
    assert encoders.metric("enginehouse_model_state", model=EMBEDDER, state="READY") == 1


def test_the_answer(encoders: Server) -> None:
    body = encoders.post("/v1/embeddings", {"input": TEXTS, "model": EMBEDDER, "user": "me"}).json()
    reference = np.load(DATA / "bert-mean-norm.npz")
    assert (body["object"], body["model"]) == ("list", EMBEDDER)
    assert [(item["object"], item["index"]) for item in body["data"]] == [
        ("embedding", i) for i in range(len(TEXTS))
    ]
    vectors = np.array([item["embedding"] for item in body["data"]])
    assert np.abs(vectors - reference["vectors"]).max() < 1e-4
    total = int(reference["lengths"].sum())
    assert body["usage"] == {"prompt_tokens": total, "total_tokens": total}


def test_alone_and_in_a_batch_the_same(encoders: Server) -> None:
    together = embed(encoders, TEXTS * 40)
    assert together == [embed(encoders, text)[0] for text in TEXTS] * 40


def test_base64_is_little_endian_fp32(encoders: Server) -> None:
    for text, vector in zip(
        embed(encoders, TEXTS, encoding_format="base64"), embed(encoders, TEXTS), strict=True
    ):
        assert isinstance(text, str)
        assert list(struct.unpack(f"<{DIMENSIONS}f", base64.b64decode(text))) == vector


def test_token_ids(encoders: Server) -> None:
    ids = [90, 97]  # "the cat", see `tiny_encoders.WORDS`
    (text,) = embed(encoders, "the cat")
    assert embed(encoders, [ids, [2, *ids, 3]]) == [text, text]
    assert embed(encoders, ids) == [text]
    assert embed(encoders, ids[::-1]) != [text]


def test_dimensions_are_cut_and_scaled(encoders: Server) -> None:
    (whole,) = embed(encoders, "paris")
    for dimensions in (1, 7, DIMENSIONS):
        (cut,) = embed(encoders, "paris", dimensions=dimensions)
        norm = math.sqrt(sum(x * x for x in whole[:dimensions]))
        assert cut == pytest.approx([x / norm for x in whole[:dimensions]], abs=1e-6)


def test_too_long_is_refused_with_both_sizes_unless_asked_to_cut(encoders: Server) -> None:
    long = "cat " * 70
    refused = encoders.post("/v1/embeddings", {"input": ["cat", long]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "input", "context_length_exceeded")
    assert "input[1] has 72 tokens" in error["message"]
    assert "at most 64" in error["message"]
    (expected,) = embed(encoders, "cat " * (MAX_INPUT - 2))
    for fields in ({"truncate": True}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": MAX_INPUT}):
        assert embed(encoders, long, **fields) == [expected]
    assert embed(encoders, long, truncate_prompt_tokens=5) == embed(encoders, "cat cat cat")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "required"),
    ({"input": ""}, "input", "nothing to embed"),
    ({"input": []}, "input", "nothing to embed"),
    ({"input": ["a", ""]}, "input", "input[1]"),
    ({"input": [[1], []]}, "input", "input[1]"),
    ({"input": ["a", [1]]}, "input", "must be a string"),
    ({"input": ["a", 1]}, "input", "must be a string"),
    ({"input": [1, "a"]}, "input", "must be a string"),
    ({"input": None}, "input", "expected"),
    ({"input": {"a": 1}}, "input", "expected"),
    ({"input": [True]}, "input[0]", "expected"),
    ({"input": [131]}, "input", "131 is not a token id"),
    ({"input": [[5], [-1]]}, "input[1][0]", ">= 0"),
    ({"input": ["a"] * 2049}, "input", "at most 2048 inputs are allowed, not 2049"),
    ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
    ({"input": "a", "dimensions": 49}, "dimensions", "have 48, not 49"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
    ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "from 3 to 64"),
    ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "from 3 to 64"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
    ({"input": "a", "truncate": 1}, "truncate", "expected bool"),
    ({"input": "a", "model": TINY}, "model", f"'{EMBEDDER}' for embeddings"),
    ({"input": "a", "model": RERANKER}, "model", f"'{EMBEDDER}' for embeddings"),
]


@pytest.mark.parametrize(("body", "param", "said"), BAD)
def test_refusals(encoders: Server, body: dict[str, Any], param: str, said: str) -> None:
    answer = encoders.post("/v1/embeddings", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert said in error["message"]
    assert error["param"] == param


def test_unknown_models(encoders: Server) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        answer = encoders.post(path, {**body, "model": "none"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("model", [EMBEDDER, RERANKER])
def test_encoders_do_not_chat(encoders: Server, model: str) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": model}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "a", "model": model})):
        answer = encoders.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "generates no text" in answer.json()["error"]["message"]


def test_records_and_metrics(encoders: Server) -> None:
    labels = {"model": EMBEDDER, "route": "/v1/embeddings"}
    finished = encoders.metric("enginehouse_requests_total", status="200", **labels)
    tokens = encoders.metric("enginehouse_tokens_total", model=EMBEDDER, kind="input")
    embed(encoders, ["cat", "the mat"])
    encoders.post("/v1/embeddings", {"input": ""})
    assert encoders.metric("enginehouse_requests_total", status="200", **labels) == finished + 1
    assert encoders.metric("enginehouse_tokens_total", model=EMBEDDER, kind="input") == tokens + 7
    assert encoders.metric("enginehouse_computed_tokens_total", model=EMBEDDER) > 0
    records = [line for line in encoders.log_lines() if line.get("event") == "request"]
    assert records[-2]["outcome"] == "finished"
    assert (records[-2]["num_choices"], records[-2]["input_tokens"]) == (2, 7)
    assert records[-2]["e2e_ms"] >= records[-2]["queue_ms"]
    assert (records[-1]["outcome"], records[-1]["status"]) == ("refused", 400)


def test_a_leaving_client_frees_the_queue(encoders: Server) -> None:
    embed(encoders, "cat")
    (worker,) = workers(encoders)
    body = json.dumps({"input": TEXTS * 100}).encode()
    gone = encoders.metric("enginehouse_requests_total", status="499", route="/v1/embeddings")
    worker.send_signal(signal.SIGSTOP)
    try:
        connection = RawConnection(encoders)
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.socket.sendall(head.encode() + body)
        wait_for(lambda: encoders.metric("enginehouse_waiting_sequences", model=EMBEDDER) == 100 * len(TEXTS))
        connection.close()
        wait_for(lambda: encoders.metric("enginehouse_waiting_sequences", model=EMBEDDER) == 0)
    finally:
        worker.send_signal(signal.SIGCONT)
    assert encoders.metric("enginehouse_requests_total", status="499", route="/v1/embeddings") == gone + 1
    embed(encoders, "cat")


def test_a_killed_worker_is_replaced_and_the_request_answered(encoders: Server) -> None:
    expected = embed(encoders, TEXTS)
    (worker,) = workers(encoders)
    worker.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(embed, encoders, TEXTS)
        wait_for(lambda: encoders.metric("enginehouse_waiting_sequences", model=EMBEDDER) == len(TEXTS))
        os.kill(worker.pid, signal.SIGKILL)
        assert future.result(60) == expected
    assert encoders.metric("enginehouse_worker_restarts_total", model=EMBEDDER) == 1


def wait_for(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


# --- OpenAI's client ---------------------------------------------------------------------------------------


def test_openai_client(encoders: Server) -> None:
    with openai.OpenAI(base_url=f"{encoders.url}/v1", api_key="unused", max_retries=0) as client:
        answer = client.embeddings.create(model=EMBEDDER, input=TEXTS)  # asks for base64 and decodes it
        plain = client.embeddings.create(model=EMBEDDER, input=TEXTS, encoding_format="float", dimensions=5)
        ids = client.embeddings.create(model=EMBEDDER, input=[[90, 97], [91]])
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="none", input="a")
        with pytest.raises(openai.BadRequestError, match="has 72 tokens"):
            client.embeddings.create(model=EMBEDDER, input="cat " * 70)
    assert [item.embedding for item in answer.data] == embed(encoders, TEXTS)
    assert [len(item.embedding) for item in plain.data] == [5] * len(TEXTS)
    assert [item.embedding for item in ids.data] == embed(encoders, [[90, 97], [91]])
    assert answer.usage.total_tokens == plain.usage.total_tokens > 0


# --- Reranking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_rerank(encoders: Server, path: str) -> None:
    reference = np.load(DATA / "bert-cross.npz")
    scores = 1 / (1 + np.exp(-reference["logits"].astype(float)))
    documents = [text if i % 2 else {"text": text, "title": "x"} for i, text in enumerate(TEXTS)]
    body = encoders.post(path, {"query": QUERY, "documents": documents, "model": RERANKER}).json()
    assert [result["index"] for result in body["results"]] == np.argsort(-scores, kind="stable").tolist()
    for result in body["results"]:
        assert set(result) == {"index", "relevance_score"}
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-5)
    assert body["model"] == RERANKER
    assert (
        body["usage"]["total_tokens"] == body["meta"]["tokens"]["input_tokens"] == reference["lengths"].sum()
    )
    top = encoders.post(path, {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": True})
    assert top.json()["results"] == [
        {**result, "document": {"text": TEXTS[result["index"]]}} for result in body["results"][:2]
    ]


def test_equal_documents_keep_their_order(encoders: Server) -> None:
    body = encoders.post("/v1/rerank", {"query": "cat", "documents": ["mat"] * 5, "top_n": 9}).json()
    assert [result["index"] for result in body["results"]] == list(range(5))
    assert len({result["relevance_score"] for result in body["results"]}) == 1


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"query": ""}, "query", "must not be empty"),
        ({"query": 5}, "query", "expected str"),
        ({"documents": []}, "documents", "1 to 2048"),
        ({"documents": ["a"] * 2049}, "documents", "not 2049"),
        ({"documents": [{"title": "x"}]}, None, "text"),
        ({"documents": "a"}, "documents", "expected array"),
        ({"top_n": 0}, "top_n", ">= 1"),
        ({"rank_fields": ["a"]}, "rank_fields", "not supported"),
        ({"max_chunks_per_doc": 5}, "max_chunks_per_doc", "not supported"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc", "not supported"),
        ({"documents": ["a", "cat " * 90]}, "documents", "documents[1] with the query has 94 tokens"),
        ({"model": EMBEDDER}, "model", f"'{RERANKER}' for reranking"),
        ({"model": TINY}, "model", f"'{RERANKER}' for reranking"),
    ],
)
def test_rerank_refusals(encoders: Server, change: dict[str, Any], param: str | None, said: str) -> None:
    answer = encoders.post("/v1/rerank", {"query": "a", "documents": ["b"], **change})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert said in error["message"]
    assert param is None or error["param"] == param


def test_rerank_cuts_when_asked(encoders: Server) -> None:
    long, cut = "cat " * 90, "cat " * (80 - 4)
    answers = [
        encoders.post("/v1/rerank", {"query": "a", "documents": [text], "truncate": True}).json()
        for text in (long, cut)
    ]
    assert answers[0]["results"] == answers[1]["results"]
    assert answers[0]["usage"]["total_tokens"] == 80


def test_without_a_rerank_model(server: Server) -> None:
    answer = server.post("/v1/rerank", {"query": "a", "documents": ["b"]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "model_not_found")
    assert "rerank.source" in error["message"]


# --- The host ----------------------------------------------------------------------------------------------


def test_settings_that_clash_or_switch_off() -> None:
    with pytest.raises(SettingsError, match=r"'smollm2' is model\.id already"):
        Encoders.of(Settings(embedding=EmbeddingSettings(id="smollm2")))
    with pytest.raises(SettingsError, match=r"'x' is embedding\.id already"):
        Encoders.of(Settings(embedding=EmbeddingSettings(id="x"), rerank=RerankSettings(source="y", id="x")))
    off = Encoders.of(Settings(embedding=EmbeddingSettings(enabled=False)))
    assert off.hosts == {}
    eager = Encoders.of(Settings(embedding=EmbeddingSettings(lazy=False)))
    assert eager.eager == {"embed"}


def test_what_is_not_served_says_how_it_would_be() -> None:
    off = Encoders.of(Settings(embedding=EmbeddingSettings(enabled=False)))
    for model in (None, "x"):
        with pytest.raises(ModelNotFoundError, match=r"embedding\.enabled"):
            off.host_for("embed", model)
        with pytest.raises(ModelNotFoundError, match=r"rerank\.source"):
            off.host_for("rerank", model)
    with pytest.raises(InvalidRequestError, match="not made for reranking"):
        off.host_for("rerank", "smollm2")


async def test_an_eager_encoder_loads_without_being_asked_and_a_load_can_be_closed() -> None:
    started: list[str] = []
    gate = asyncio.Event()

    async def start(config: EncoderEngineConfig, _progress: Any) -> Any:
        started.append(config.model_id)
        await gate.wait()

    settings = Settings(embedding=EmbeddingSettings(lazy=False), rerank=RerankSettings(source="y"))
    encoders = Encoders.of(settings, start)
    encoders.start()
    await asyncio.sleep(0)
    assert started == ["all-minilm-l6-v2"]
    assert [host.state for host in encoders.hosts.values()] == ["loading", "unloaded"]
    waiting = asyncio.create_task(encoders.hosts["embed"].engine())
    await asyncio.sleep(0)
    await encoders.close()
    with pytest.raises(ShuttingDownError):
        await waiting


async def test_a_failed_load_is_said_and_not_repeated_at_once() -> None:
    starts = 0

    async def start(_config: EncoderEngineConfig, _progress: Any) -> Any:
        nonlocal starts
        starts += 1
        raise SourceError("no such package")

    host = EncoderHost("embed", EmbeddingSettings(), "pypi:x", start)
    for _ in range(3):
        with pytest.raises(ModelLoadFailedError, match="no such package") as failure:
            await host.engine()
        assert failure.value.retry_after_s
    assert (starts, host.state, host.snapshot().state) == (1, "failed", "ERROR")
    await host.close()


async def test_the_wait_for_a_load_is_bounded_and_a_leaving_client_does_not_end_it() -> None:
    gate = asyncio.Event()
    engines: list[Any] = []

    class Engine:
        state, detail = "ready", ""

        async def close(self) -> None:
            engines.remove(self)

    async def start(_config: EncoderEngineConfig, progress: Any) -> Any:
        progress("download", 0.5)
        await gate.wait()
        engines.append(Engine())
        return engines[0]

    host = EncoderHost("embed", EmbeddingSettings(load_wait_s=0.05), "pypi:x", start)
    first = asyncio.create_task(host.engine())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(ModelLoadingError, match="download, 50%"):
        await host.engine()
    assert host.state == "loading"
    gate.set()
    assert await host.engine() is await host.engine() is engines[0]
    assert len(engines) == 1
    await host.close()
    assert engines == []


@pytest.mark.model
def test_the_default_model_over_http(server: Server) -> None:
    reference = np.load(DATA / "default-model.npz")
    vectors = np.array(embed(server, TEXTS))
    assert np.abs(vectors - reference["vectors"][: len(TEXTS)]).max() < 1e-4
