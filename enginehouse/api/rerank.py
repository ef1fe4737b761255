"""`POST /v1/rerank` and `POST /rerank`, in the shape that Cohere and Jina share."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from enginehouse.api.encoding import TruncationFields, check_lengths, in_thread_when_long, limit_of
from enginehouse.api.json_body import decode
from enginehouse.api.openai.parameters import PositiveInt
from enginehouse.engine.encoder_config import EncoderTask
from enginehouse.errors import InvalidRequestError

if TYPE_CHECKING:
    from enginehouse.engine.encoder_engine import Encoded, EncoderEngine
    from enginehouse.runtime.encoder_tokenizer import TokenizedInput

MAX_DOCUMENTS = 2048


class RerankDocument(Struct):
    """A document given as an object; fields beside its text are ignored."""

    text: str


class RerankBody(TruncationFields, kw_only=True):
    """The body of a rerank request."""

    query: str
    documents: list[str | RerankDocument]
    top_n: PositiveInt | None = None
    return_documents: bool | None = None

    # Known to one of the two protocols, and not supported.
    rank_fields: Any = None
    max_chunks_per_doc: Any = None
    max_tokens_per_doc: Any = None


_decoder = msgspec.json.Decoder(RerankBody)
_REFUSED = ("rank_fields", "max_chunks_per_doc", "max_tokens_per_doc")


class Rerank:
    """How relevant each document is to a query: scores from 0 to 1, the best first."""

    task: EncoderTask = "rerank"

    def parse(self, body: bytes) -> RerankCall:
        """Check a body. Raises `InvalidRequestError`."""
        fields = decode(body, _decoder)
        for name in _REFUSED:
            if getattr(fields, name) is not None:
                raise InvalidRequestError(f"{name} is not supported by this server.", param=name)
        if not fields.query:
            raise InvalidRequestError("query: must not be empty.", param="query")
        if not 1 <= len(fields.documents) <= MAX_DOCUMENTS:
            raise InvalidRequestError(
                f"documents: 1 to {MAX_DOCUMENTS} are allowed, not {len(fields.documents)}.",
                param="documents",
            )
        return RerankCall(fields)


class RerankCall:
    """See `Encoding`."""

    def __init__(self, fields: RerankBody) -> None:
        self._fields = fields
        self._texts = [entry if isinstance(entry, str) else entry.text for entry in fields.documents]
        self.num_inputs, self.model = len(self._texts), fields.model

    def check(self, engine: EncoderEngine) -> None:
        """Nothing depends on the model."""

    async def tokenize(self, engine: EncoderEngine) -> list[TokenizedInput]:
        """Each document paired with the query."""
        query, texts, tokenizer = self._fields.query, self._texts, engine.tokenizer
        limit = limit_of(self._fields, engine, pair=True)
        num_chars = len(query) + sum(map(len, texts))
        inputs = await in_thread_when_long(num_chars, lambda: tokenizer.encode_pairs(query, texts, limit))
        check_lengths(inputs, engine, lambda index: f"documents[{index}] with the query")
        return inputs

    def answer(self, engine: EncoderEngine, results: list[Encoded], num_tokens: int) -> dict[str, Any]:
        """Results by falling score; equal ones in the order given."""
        scores = [_sigmoid(engine.floats(result.vector)[0]) for result in results]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        return {
            "id": f"rerank-{secrets.token_hex(14)}",
            "object": "list",
            "model": engine.config.model_id,
            "results": [self._result(index, scores[index]) for index in order[: self._fields.top_n]],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": num_tokens}},
        }

    def _result(self, index: int, score: float) -> dict[str, Any]:
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if self._fields.return_documents:
            result["document"] = {"text": self._texts[index]}
        return result


def _sigmoid(logit: float) -> float:
    """1 / (1 + e^-x), without overflow."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    power = math.exp(logit)
    return power / (1 + power)
