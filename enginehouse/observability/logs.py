"""Structured log lines on standard error. Prompts and outputs are never given to a logger, and tracebacks are
written without the values of local variables, which may hold them."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.types import Processor

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso"),
]


def configure_logging(level: str = "info", format: str = "auto") -> None:
    """Send structlog, and the standard library's `logging`, to standard error.

    `format` is "json", "console", or "auto" (console on a terminal). Other libraries are heard from `warning` on.
    Raises `KeyError` for an unknown level. Call it once, before the first line is written.
    """
    console = format == "console" or (format == "auto" and sys.stderr.isatty())
    renderers = _console_renderers() if console else _json_renderers()
    structlog.configure(
        processors=[*_SHARED, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[remove_meta, *renderers], foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder()]
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("enginehouse").setLevel(LEVELS[level])


def _json_renderers() -> list[Processor]:
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _console_renderers() -> list[Processor]:
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(pad_event_to=0, exception_formatter=plain)]
