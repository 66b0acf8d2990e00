"""What the server or a connection says, as errors of ours; a function's own fault is a bug and stays what it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from headrace.broker import tls
from headrace.broker.errors import BrokerDown, BrokerFull

_FULL_RETRY_S = 5
_DOWN_RETRY_S = 1
_REFUSED_INSIDE = ("ACL failure in script", "The user executing the script can't")
"""A function began, and then called or touched what its caller may not; in the words of Valkey, and of Redis 7.0."""


@contextlib.contextmanager
def broker_errors() -> Iterator[None]:
    """Raise BrokerFull or BrokerDown in place of what redis-py raises."""
    try:
        yield
    except OutOfMemoryError as error:
        raise BrokerFull(retry_after_s=_FULL_RETRY_S) from error
    except (ReadOnlyError, ClusterDownError, TryAgainError, AskError) as error:  # MovedError is an AskError
        raise BrokerDown(f"the broker cannot do this now: {error}", retry_after_s=_DOWN_RETRY_S) from error
    except (AuthenticationError, NoPermissionError) as error:  # passwords and rights change while we run
        raise BrokerDown(f"the broker refuses our user: {error}", retry_after_s=_DOWN_RETRY_S) from error
    except ResponseError as error:
        if any(words in str(error) for words in _REFUSED_INSIDE):
            raise BrokerDown(f"the broker refuses our user: {error}", retry_after_s=_DOWN_RETRY_S) from error
        if str(error).startswith(("NOREPLICAS", "MISCONF", "BUSY")):
            raise BrokerDown(f"the broker cannot do this now: {error}", retry_after_s=_DOWN_RETRY_S) from error
        raise
    except (TimeoutError, RedisError, OSError) as error:
        raise BrokerDown(tls.refusal(error) or "", retry_after_s=_DOWN_RETRY_S) from error
