"""To which address a request says that it was sent, and from whose page: what keeps pages away from a pod without keys.

There being on this machine is the only right there is, and every page in a browser here has it. A page of another
origin may post without asking, and one whose name was made to point at 127.0.0.1 after it was loaded (DNS rebinding)
counts as of the same origin. The first says so in `Origin`, the second in `Host`.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

from starlette.requests import HTTPConnection

from headrace.api import origins
from headrace.api.access import is_loopback
from headrace.broker.errors import BadRequest, HostNotAllowed, OriginNotAllowed
from headrace.broker.settings import Settings

_PORT = re.compile(r":[0-9]{0,5}$")


def check(request: HTTPConnection) -> None:
    """Raises BadRequest for a request without a host, or with several."""
    given = request.headers.getlist("host")
    if len(given) > 1 or (not given and request.scope.get("http_version") == "1.1"):
        raise BadRequest("a request must have one Host header", param="Host")


def check_page(request: HTTPConnection, settings: Settings) -> None:
    """For a request that needs no key: raises HostNotAllowed or OriginNotAllowed if it may be a foreign page's."""
    if not is_loopback(settings.api.host):
        return  # who opens a pod to others knows what it is called there
    given = request.headers.getlist("host")
    name = _PORT.sub("", given[0]).lower() if given else ""
    if name and not _is_local(name) and name not in settings.api.hosts:
        raise HostNotAllowed(param="Host")
    if not origins.is_welcome(request, settings.api.origins):
        raise OriginNotAllowed(param="Origin")


@lru_cache(256)  # clients say the same few
def _is_local(name: str) -> bool:
    """An address in numbers cannot be pointed elsewhere; of names, `localhost` is always this machine (RFC 6761)."""
    try:
        return bool(ipaddress.ip_address(name.removeprefix("[").removesuffix("]")))
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
