"""Who can reach a pod, and whether anybody would be let in: said before it begins to listen."""

from __future__ import annotations

import logging

from headrace.api.access import is_loopback
from headrace.broker.errors import BrokerDown, ConfigError
from headrace.broker.protocol import Broker
from headrace.broker.settings import Settings

log = logging.getLogger(__name__)


async def check(settings: Settings, broker: Broker) -> None:
    """Raise ConfigError if others can reach this pod and there are no keys.

    A pod that starts while its broker is down cannot know; it lets nobody in until it has seen a key.
    """
    host = settings.api.host
    if is_loopback(host) or settings.api.insecure or settings.keys:
        return
    try:
        has_keys = await broker.ledger.version() != 0
    except BrokerDown:
        log.warning("the broker is down: nobody is let in before it is there", extra={"event": "no_keys_yet"})
        return
    if not has_keys:
        raise ConfigError(
            f"api.host: {host!r} is open to others, but there are no keys: make one (`headrace keys create OWNER`, or "
            "`headrace keys new OWNER` and its line under `keys`), bind 127.0.0.1, or say --insecure to let anybody in"
        )
