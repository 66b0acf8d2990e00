"""What can go wrong for a caller.

ClientError
├── RequestRefused    the server does not take this request; nothing was begun
├── StreamFailed      the answer was begun, and the server says that it has failed
└── ConnectionLost    no server could be reached for too long, or the server named no job to go on with
"""

from __future__ import annotations

import json
from typing import Any


class ClientError(Exception):
    """The base of this client's errors."""


class RequestRefused(ClientError):
    """The server does not take this request."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        """When to try again, if the server said it in seconds."""
        super().__init__(f"{status} {code}: {message}")


class StreamFailed(ClientError):
    """The server says that the answer has failed; the text before it is right, and all there is."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(f"{code}: {message}")


class ConnectionLost(ClientError):
    """The connection is lost for good."""


def read_error(body: bytes) -> tuple[str, str] | None:
    """Code and message of an OpenAI error envelope; None for anything else, such as a proxy's page."""
    try:
        return error_in(json.loads(body))
    except ValueError:
        return None


def error_in(value: Any) -> tuple[str, str] | None:
    """The same, of JSON that has been read."""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return None
    return str(error.get("code") or error.get("type") or "error"), str(error.get("message") or "")
