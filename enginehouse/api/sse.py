"""Server-sent events: bytes of frames."""

from __future__ import annotations

from typing import Any

import msgspec

DONE_FRAME = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def data_frame(value: Any) -> bytes:
    """`data: {json}`. JSON has no raw newlines, so one line is enough."""
    return b"data: %b\n\n" % _encode(value)


def event_frame(event: str, value: Any) -> bytes:
    """A frame with a name: `event: {event}` before the data."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), _encode(value))
