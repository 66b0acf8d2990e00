"""When the stages of one request were over, as its log tells: what a pod's metrics, log lines and traces read.

Whoever reads a log from its first entry gets the same figures, whichever pod it is. Nothing here is done per token:
`note` is given the entries before the first content, and those that make no frame.
"""

from __future__ import annotations

from headrace.broker import keys
from headrace.broker.messages import Claimed, Delta, Ended, Queued, ReadEntry, Result, Started


class Stages:
    """Milliseconds since the job was enqueued, by the broker's clock; None for what has not come."""

    __slots__ = (
        "attempt",
        "attempts",
        "cached_tokens",
        "claimed_ms",
        "ended",
        "ended_ms",
        "enqueued_ms",
        "first_ms",
        "prompt_tokens",
        "started_ms",
    )

    def __init__(self) -> None:
        self.enqueued_ms = 0
        """When it was enqueued, in epoch milliseconds."""
        self.claimed_ms: int | None = None
        """Its first claim."""
        self.started_ms: int | None = None
        """The engine had accepted the prompt, in the attempt that made the first content."""
        self.first_ms: int | None = None
        """The first content: text, reasoning, a tool call, or a `Result`."""
        self.ended_ms: int | None = None
        self.ended: Ended | None = None
        self.attempt = 0
        """The number of the last attempt; numbers may be left out."""
        self.attempts = 0
        """How many there were."""
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def note(self, entry: ReadEntry) -> None:
        """Take an entry in; to do it twice does no harm."""
        for event in entry.events:
            match event:
                case Delta():
                    if self.first_ms is None and (event.text or event.reasoning or event.tool_calls):
                        self.first_ms = entry.at_ms
                case Started():
                    self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
                    if self.first_ms is None:
                        self.started_ms = entry.at_ms
                case Claimed():
                    self._claimed(keys.position(entry.id)[0], entry.at_ms)
                case Result():
                    self.first_ms = entry.at_ms
                case Ended():
                    self.ended, self.ended_ms = event, entry.at_ms
                case Queued():
                    self.enqueued_ms = event.enqueued_ms

    def _claimed(self, attempt: int, at_ms: int) -> None:
        if attempt > self.attempt:
            self.attempt = attempt
            self.attempts += 1
            if self.claimed_ms is None:
                self.claimed_ms = at_ms

    @property
    def completion_tokens(self) -> int:
        """Of the whole job; 0 before its end."""
        return self.ended.usage.completion_tokens if self.ended is not None and self.ended.usage else 0

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first, over all attempts; None before the end, or of one token."""
        if self.first_ms is None or self.ended_ms is None or self.completion_tokens < 2:
            return None
        return (self.ended_ms - self.first_ms) / (self.completion_tokens - 1)
