"""The files of the two pages, as they are sent: read once, with a tag, under a policy that lets them run nothing else.

No inline script or style, nothing of a third party, and no text that becomes markup (`require-trusted-types-for`): what
a model says can only be text, whatever a page's own code gets wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.errors import NotFound

_FOLDER = Path(__file__).parent / "pages"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src {connect}; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


class File(NamedTuple):
    """A file as it is sent."""

    body: bytes
    media_type: str
    tag: str


class Site:
    """The files by name. `origins` are those of other pods whose streams a page may go on with."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._files = {path.name: _read(path) for path in (*_FOLDER.iterdir(), _client())}
        named = (origin for origin in origins if origin != "*")
        self._headers = {
            "content-security-policy": _POLICY.format(connect=" ".join(("'self'", *named))),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-cache",
            "vary": "Accept",
        }

    def answer(self, request: Request, name: str) -> Response:
        """A file, or 304 if the browser has it; raises NotFound."""
        file = self._files.get(name)
        if file is None:
            raise NotFound("there is no such file here")
        headers = {**self._headers, "etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)


def _read(path: Path) -> File:
    body = path.read_bytes()
    return File(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _client() -> Path:
    """The published browser client, which stands in another room: it is found, and nothing of that room is imported."""
    spec = find_spec("headrace.client")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "js" / "headrace.js"
