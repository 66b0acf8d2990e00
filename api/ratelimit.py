"""How the limits of a caller's key stand, in the headers that clients know."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime

from headrace.broker.limits import Bucket, Standing


def headers(form_name: str, standing: Standing) -> dict[str, str]:
    """OpenAI's `x-ratelimit-*`, or Anthropic's `anthropic-ratelimit-*` in its formats; {} where there is no limit."""
    named = _anthropic if form_name.startswith("anthropic.") else _openai
    found: dict[str, str] = {}
    for kind, bucket in zip(("requests", "tokens"), standing, strict=True):
        if bucket is not None:
            found |= named(kind, bucket)
    return found


def _openai(kind: str, bucket: Bucket) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{kind}": str(bucket.limit),
        f"x-ratelimit-remaining-{kind}": str(bucket.left),
        f"x-ratelimit-reset-{kind}": _duration(bucket.reset_ms),
    }


def _anthropic(kind: str, bucket: Bucket) -> dict[str, str]:
    reset = datetime.fromtimestamp(math.ceil(time.time() + bucket.reset_ms / 1000), UTC)
    return {
        f"anthropic-ratelimit-{kind}-limit": str(bucket.limit),
        f"anthropic-ratelimit-{kind}-remaining": str(bucket.left),
        f"anthropic-ratelimit-{kind}-reset": reset.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _duration(ms: int) -> str:
    """As OpenAI writes it: `20ms`, `6s`, `1m30s`."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, seconds = divmod(math.ceil(ms / 1000), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
