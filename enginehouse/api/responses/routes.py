"""`GET` and `DELETE /v1/responses/{id}`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from enginehouse.api.errors import ResponseNotFoundError
from enginehouse.api.openai.parameters import encode_json
from enginehouse.api.responses.store import ResponseStore
from enginehouse.errors import InvalidRequestError


def stored_responses_router(store: ResponseStore) -> APIRouter:
    """The routes for what `store` holds."""
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/responses/{response_id}", summary="A stored response")
    async def get_response(request: Request, response_id: str) -> Response:
        """The response as it was answered, while it is stored."""
        if request.query_params.get("stream", "false").lower() != "false":
            raise InvalidRequestError("stream: a stored response is not streamed.", param="stream")
        stored = store.get(response_id)
        if stored is None:
            raise _not_found(response_id)
        return Response(stored.body, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", summary="Forget a stored response")
    async def delete_response(response_id: str) -> Response:
        """It cannot be read or continued any more; responses that continue it already can."""
        if not store.delete(response_id):
            raise _not_found(response_id)
        shown = {"id": response_id, "object": "response", "deleted": True}
        return Response(encode_json(shown), media_type="application/json")

    return router


def _not_found(response_id: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(f"There is no response '{response_id[:100]}', or not any more.")
