"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from enginehouse.api.encoding import TruncationFields, check_lengths, in_thread_when_long, limit_of
from enginehouse.api.json_body import decode
from enginehouse.api.openai.parameters import PositiveInt, TokenId, encode_json
from enginehouse.engine.encoder_config import EncoderTask
from enginehouse.errors import InvalidRequestError

if TYPE_CHECKING:
    from enginehouse.engine.encoder_engine import Encoded, EncoderEngine
    from enginehouse.runtime.encoder_tokenizer import TokenizedInput

MAX_INPUTS = 2048


class EmbeddingBody(TruncationFields, kw_only=True):
    """The body of an embedding request."""

    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None


_decoder = msgspec.json.Decoder(EmbeddingBody)


class Embeddings:
    """Vectors of texts or token ids, in the order of the input. A text's vector is the same alone or in a batch."""

    route = "/v1/embeddings"
    task: EncoderTask = "embed"

    def parse(self, body: bytes) -> EmbeddingCall:
        """Check a body. Raises `InvalidRequestError`."""
        fields = decode(body, _decoder)
        return EmbeddingCall(fields, _inputs(fields.input))


def _inputs(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One entry for each vector. Raises `InvalidRequestError` for none, too many, empty ones, and mixtures."""
    if given in ("", []):
        raise InvalidRequestError("input: there is nothing to embed.", param="input")
    if isinstance(given, str):
        return [given]
    ids = [entry for entry in given if isinstance(entry, int)]
    if len(ids) == len(given):
        return [ids]
    if len(given) > MAX_INPUTS:
        raise InvalidRequestError(
            f"input: at most {MAX_INPUTS} inputs are allowed, not {len(given)}.", param="input"
        )
    inputs: list[str | list[int]] = []
    for index, entry in enumerate(given):
        if isinstance(entry, int) or type(entry) is not type(given[0]):
            raise InvalidRequestError(
                "input: must be a string, token ids, or a list of the one or the other.", param="input"
            )
        if not entry:
            raise InvalidRequestError(f"input[{index}]: there is nothing to embed.", param="input")
        inputs.append(entry)
    return inputs


def _written(vector: list[float]) -> msgspec.Raw:
    """A vector as JSON. Encoding thousands of them in one call would hold the interpreter for the whole time."""
    return msgspec.Raw(encode_json(vector))


class EmbeddingCall:
    """See `Encoding`."""

    def __init__(self, fields: EmbeddingBody, inputs: list[str | list[int]]) -> None:
        self._fields, self._inputs = fields, inputs
        self.num_inputs, self.model = len(inputs), fields.model

    def check(self, engine: EncoderEngine) -> None:
        """Raises `InvalidRequestError` for more dimensions than there are, and for ids of no token."""
        wanted = self._fields.dimensions
        if wanted is not None and wanted > engine.dimensions:
            raise InvalidRequestError(
                f"dimensions: this model's embeddings have {engine.dimensions}, not {wanted}.",
                param="dimensions",
            )
        size = engine.tokenizer.vocab_size
        for entry in self._inputs:
            largest = -1 if isinstance(entry, str) else max(entry)
            if largest >= size:
                raise InvalidRequestError(
                    f"input: {largest} is not a token id; they go from 0 to {size - 1}. Ids of another model's "
                    "tokenizer mean nothing to this one: send text instead.",
                    param="input",
                )

    async def tokenize(self, engine: EncoderEngine) -> list[TokenizedInput]:
        """See `Encoding`."""
        limit, tokenizer = limit_of(self._fields, engine, pair=False), engine.tokenizer
        texts = [entry for entry in self._inputs if isinstance(entry, str)]
        if texts:
            inputs = await in_thread_when_long(sum(map(len, texts)), lambda: tokenizer.encode(texts, limit))
        else:
            inputs = [tokenizer.with_ends(entry, limit) for entry in self._inputs if isinstance(entry, list)]
        single = not isinstance(self._fields.input, list) or isinstance(self._fields.input[0], int)
        check_lengths(inputs, engine, lambda index: "input" if single else f"input[{index}]")
        return inputs

    def answer(self, engine: EncoderEngine, results: list[Encoded], num_tokens: int) -> dict[str, Any]:
        """OpenAI's list of embeddings."""
        vectors = [result.vector for result in results]
        if self._fields.dimensions is not None:
            vectors = [engine.shortened(vector, self._fields.dimensions) for vector in vectors]
        as_text = self._fields.encoding_format == "base64"
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": base64.b64encode(vector).decode()
                    if as_text
                    else _written(engine.floats(vector)),
                }
                for index, vector in enumerate(vectors)
            ],
            "model": engine.config.model_id,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
