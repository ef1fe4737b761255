"""The FastAPI application: every route in one list, middleware in one other."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware import Middleware
from starlette.responses import Response

import enginehouse
from enginehouse.api import basics, encoding, ops
from enginehouse.api.answering import ApiState, GenerationProtocol, GenerationResponse
from enginehouse.api.anthropic.count_tokens import count_tokens_router
from enginehouse.api.anthropic.messages import Messages, MessagesBody
from enginehouse.api.encoder_host import Encoders
from enginehouse.api.engine_host import EngineHost, StartEngine, start_llm_engine
from enginehouse.api.errors import install_handlers
from enginehouse.api.hosts import HostMiddleware, allowed_names
from enginehouse.api.middleware import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    HeadMiddleware,
    PreflightMiddleware,
    RequestContextMiddleware,
)
from enginehouse.api.openai.chat import ChatBody, ChatCompletions
from enginehouse.api.openai.completions import CompletionBody, Completions
from enginehouse.api.openai.embeddings import EmbeddingBody, Embeddings
from enginehouse.api.openai.models import encoder_object, model_list, model_object
from enginehouse.api.openapi import describe, request_body
from enginehouse.api.rerank import Rerank, RerankBody
from enginehouse.api.responses.protocol import Responses
from enginehouse.api.responses.request import ResponsesBody
from enginehouse.api.responses.routes import stored_responses_router
from enginehouse.api.responses.store import ResponseStore
from enginehouse.api.shutdown import Shutdown, ShutdownMiddleware
from enginehouse.api.tokenize import tokenize_router
from enginehouse.errors import EnginehouseError
from enginehouse.observability.metrics import Metrics
from enginehouse.settings import ServerSettings, Settings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine

_LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_EXPOSED_HEADERS = ("x-request-id", "request-id", "retry-after")


def create_app(
    settings: Settings,
    *,
    start_engine: StartEngine = start_llm_engine,
    on_ready: Callable[[LLMEngine], None] | None = None,
    on_failed: Callable[[EnginehouseError], None] | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> FastAPI:
    """An application that serves `settings.model`.

    Its lifespan starts the engine in the background and closes it, so `/health` answers at once and requests get
    503 `model_loading` until the model is there. `on_ready`, `on_failed` and `on_progress` (which other threads
    may call too) tell the caller how loading went.
    """
    host = EngineHost(
        settings,
        start_engine=start_engine,
        on_ready=on_ready,
        on_failed=on_failed,
        on_progress=on_progress,
    )

    encoders = Encoders.of(settings)
    shutdown = Shutdown(host, encoders)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        host.start()
        encoders.start()
        try:
            yield
        finally:
            await shutdown.close()

    app = FastAPI(
        title="Enginehouse",
        version=enginehouse.__version__,
        description="An LLM serving system you can run, watch and take apart.",
        lifespan=lifespan,
        middleware=_middleware(settings, shutdown),
        redirect_slashes=False,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    metrics = Metrics(lambda: [*host.snapshots(), *encoders.snapshots()])
    app.state.api = ApiState(host, metrics, settings.server)
    app.state.encoders = encoders
    app.state.shutdown = shutdown
    install_handlers(app)
    app.include_router(ops.router)
    app.include_router(_models_router(host, encoders))
    app.include_router(tokenize_router(host))
    app.include_router(count_tokens_router(host))
    responses = _response_store(settings.server)
    app.include_router(stored_responses_router(responses))
    _add_generating_routes(app, responses)
    _add_encoding_routes(app)
    describe(app)
    return app


def _response_store(server: ServerSettings) -> ResponseStore:
    return ResponseStore(
        max_responses=server.max_stored_responses,
        max_bytes=server.max_stored_response_bytes,
        ttl_s=server.stored_response_ttl_s,
        clock=time.monotonic,
    )


def _add_generating_routes(app: FastAPI, responses: ResponseStore) -> None:
    teaching, openai = "teaching", "OpenAI"
    for protocol, body, tag, summary in (
        (basics.BasicGenerate(), basics.PromptBody, teaching, "One prompt, one answer"),
        (basics.Generate(), basics.PromptsBody, teaching, "Several prompts at once"),
        (basics.GenerateStream(), basics.PromptBody, teaching, "One prompt, an event for each token"),
        (basics.GenerateVLLM(), basics.PromptsBody, teaching, "The same on the vLLM backend"),
        (Completions(), CompletionBody, openai, "Continue a text"),
        (ChatCompletions(), ChatBody, openai, "Answer a conversation"),
        (Responses(responses), ResponsesBody, openai, "Answer items of input, and remember the answer"),
        (Messages(), MessagesBody, "Anthropic", "Answer a conversation"),
    ):
        app.add_api_route(
            protocol.route,
            _endpoint(protocol),
            methods=["POST"],
            response_model=None,
            response_class=Response,
            tags=[tag],
            summary=summary,
            description=protocol.__doc__ or "",
            name=protocol.route.strip("/").replace("/", "_"),
            openapi_extra=request_body(body),
        )


def _add_encoding_routes(app: FastAPI) -> None:
    for path, protocol, body, tag, summary in (
        (Embeddings.route, Embeddings(), EmbeddingBody, "OpenAI", "Vectors of texts"),
        ("/v1/rerank", Rerank(), RerankBody, "rerank", "Order documents by relevance to a query"),
        ("/rerank", Rerank(), RerankBody, "rerank", "The same under Jina's other path"),
    ):
        app.add_api_route(
            path,
            encoding.endpoint(protocol),
            methods=["POST"],
            response_model=None,
            response_class=Response,
            tags=[tag],
            summary=summary,
            description=protocol.__doc__ or "",
            name=path.strip("/").replace("/", "_"),
            openapi_extra=request_body(body),
        )


def _endpoint(protocol: GenerationProtocol) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        return GenerationResponse(request, protocol)

    return endpoint


def _models_router(host: EngineHost, encoders: Encoders) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models", summary="The models that can be asked for")
    async def list_models() -> Response:
        return ops.json_response(model_list(host, encoders))

    @router.get("/v1/models/{model_id:path}", summary="One model, and how far its load is")
    async def get_model(model_id: str) -> Response:
        encoder = encoders.named(model_id)
        if encoder is not None:
            return ops.json_response(encoder_object(encoder))
        host.check_model(model_id)
        return ops.json_response(model_object(host))

    return router


def _middleware(settings: Settings, shutdown: Shutdown) -> list[Middleware]:
    """Outermost first."""
    server: ServerSettings = settings.server
    keys = [key.get_secret_value() for key in server.api_keys]
    stack = [Middleware(RequestContextMiddleware, access_log=settings.log.access)]
    names = allowed_names(server)
    if names is not None:
        stack.append(Middleware(HostMiddleware, names=names))
    stack.append(
        Middleware(
            PreflightMiddleware,
            allow_origins=server.cors_origins,
            allow_origin_regex=_LOCAL_ORIGIN,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
        )
    )
    if keys:
        stack.append(Middleware(ApiKeyMiddleware, keys=keys))
    stack.append(Middleware(ShutdownMiddleware, shutdown=shutdown))
    limit = Middleware(
        BodyLimitMiddleware, max_body_bytes=server.max_body_bytes, timeout_s=server.body_timeout_s
    )
    stack += [limit, Middleware(HeadMiddleware)]
    return stack
