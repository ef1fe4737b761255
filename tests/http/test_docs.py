"""docs/api.md knows every route, every field and every error."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import enginehouse.api.errors as api_errors
from enginehouse.api.anthropic.messages import MessagesBody
from enginehouse.api.app import create_app
from enginehouse.api.basics import PromptBody, PromptsBody
from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openai.completions import CompletionBody
from enginehouse.api.openai.embeddings import EmbeddingBody
from enginehouse.api.rerank import RerankBody
from enginehouse.api.responses.request import ResponsesBody
from enginehouse.api.tokenize import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from enginehouse.settings import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()


def test_routes() -> None:
    paths = create_app(Settings()).openapi()["paths"]
    assert len(paths) >= 12
    for path in paths:
        assert path.replace("{model_id}", "{id}") in PAGE


@pytest.mark.parametrize(
    "body",
    [
        ChatBody,
        CompletionBody,
        PromptBody,
        PromptsBody,
        MessagesBody,
        ResponsesBody,
        TokenizeBody,
        DetokenizeBody,
        ApplyTemplateBody,
    ],
)
def test_fields(body: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(body):
        assert f"`{field.name}`" in PAGE or f'"{field.name}"' in PAGE, field.name


@pytest.mark.parametrize("body", [EmbeddingBody, RerankBody])
def test_fields_of_encoders(body: type[msgspec.Struct]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "embeddings.md").read_text()
    for field in msgspec.structs.fields(body):
        assert f"`{field.name}`" in page, field.name


def test_error_codes() -> None:
    for name in dir(api_errors):
        kind = getattr(api_errors, name)
        code = getattr(kind, "code", None) if isinstance(kind, type) else None
        assert not isinstance(code, str) or code in PAGE, name
