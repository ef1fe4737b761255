"""The `usage` object."""

from __future__ import annotations

from typing import Any

from enginehouse.api.generation import Usage


def usage_object(usage: Usage) -> dict[str, Any]:
    """Totals of a request in OpenAI's shape."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
