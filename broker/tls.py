"""TLS to the server: a `rediss://` URL, who is trusted, and who we are. The server's name is checked always."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.broker.errors import ConfigError
from headrace.broker.settings import RedisSettings

_FILES = {"tls_ca_file": "ssl_ca_certs", "tls_cert_file": "ssl_certfile", "tls_key_file": "ssl_keyfile"}


def options(url: str, settings: RedisSettings) -> dict[str, Any]:
    """What redis-py is told for this URL, in place of what the URL itself says of TLS.

    Raises ConfigError if a file cannot be read, or is given for a connection without TLS, or a key without its
    certificate.
    """
    given = {field: path for field in _FILES if (path := getattr(settings, field)) is not None}
    if not url.startswith("rediss://"):
        for field, path in given.items():
            raise ConfigError(f"redis.{field}: {path!r} is for TLS; redis.url must begin with rediss://")
        return {}
    if settings.tls_key_file is not None and settings.tls_cert_file is None:
        raise ConfigError(f"redis.tls_key_file: {settings.tls_key_file!r} needs redis.tls_cert_file")
    for field, path in given.items():
        _check(field, path)
    files = {_FILES[field]: path for field, path in given.items()}
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_min_version": ssl.TLSVersion.TLSv1_2, **files}


def _check(field: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"redis.{field}: {path!r} cannot be read: {error.strerror}") from error


def refusal(error: BaseException) -> str | None:
    """What TLS itself said, in a sentence, if that is why a connection failed."""
    for seen in _chain(error):
        if isinstance(seen, ssl.SSLCertVerificationError):
            return f"the broker's certificate is not trusted: {seen.verify_message} (redis.url, redis.tls_ca_file)"
        if isinstance(seen, ssl.SSLError):
            said = (seen.reason or str(seen)).replace("_", " ").lower()
            return f"the broker refuses TLS: {said} (redis.tls_cert_file, redis.tls_key_file)"
    return None


def suspicion(error: BaseException, url: str, settings: RedisSettings) -> str | None:
    """Why the first connection may have been reset: a server that misses a certificate hangs up while the login is on
    its way, and what it says of that is often lost."""
    is_bare = url.startswith("rediss://") and settings.tls_cert_file is None
    if is_bare and any(isinstance(seen, ConnectionResetError | BrokenPipeError) for seen in _chain(error)):
        return "the broker refuses TLS: it hangs up, so it may want a certificate (redis.tls_cert_file)"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
