"""A replica's /metrics, for Prometheus: a thread of its own, on a port that the registry tells."""

from __future__ import annotations

import logging

from prometheus_client import start_http_server

from headrace.broker import addresses
from headrace.broker.errors import ConfigError
from headrace.broker.settings import Settings

log = logging.getLogger(__name__)

PORTS = 32
"""How many ports are tried, so that the replicas of one host can share a configuration."""


class MetricsServer:
    """What this process measures, served until `close` or its end. Raises ConfigError if no port is free."""

    def __init__(self, settings: Settings) -> None:
        port, host = settings.worker.metrics_port, settings.api.host
        self.location = ""
        """Where Prometheus finds it, as `host:port`; empty if the settings say nowhere."""
        if port is None:
            return
        for each in range(port, min(port + PORTS, 65_536)) if port else (0,):
            try:
                self._server, self._thread = start_http_server(each, host)
            except OSError:
                continue
            self.location = addresses.location(host, self._server.server_port)
            log.info("metrics on %s", self.location, extra={"event": "metrics_served"})
            return
        raise ConfigError(f"worker.metrics_port: none of {PORTS} ports from {port} on is free on {host}")

    def close(self) -> None:
        if self.location:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
