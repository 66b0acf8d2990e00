"""What Ray Serve calls. It pickles this module by value into its controller, so it holds nothing but this class."""

from __future__ import annotations

from typing import Any


class Policy:
    """Serve makes one for each deployment from its import path and these values, and calls it ten times a second."""

    def __init__(self, plain_settings: dict[str, Any], model: str, broker_url: str, watches: bool = False) -> None:
        import weakref

        import msgspec

        from headrace.broker.redis_broker import RedisBroker
        from headrace.broker.settings import Settings
        from headrace.cluster.autoscaler import Autoscaler

        settings = msgspec.convert(plain_settings, Settings)
        self._autoscaler = Autoscaler(
            settings, model, lambda: RedisBroker(broker_url, settings.redis, settings.queue), watches=watches
        )
        self._autoscaler.start()
        weakref.finalize(self, self._autoscaler.stop)  # Serve drops it when the deployment goes or changes

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Serve's `AutoscalingContext` in; the number, and no state of ours for Serve to keep."""
        return self._autoscaler.decide(context.target_num_replicas), {}
