"""The same server as the HTTP tests use."""

from tests.http.conftest import _plain_logs, server

__all__ = ["_plain_logs", "server"]
