"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from functools import partial

import msgspec

from headrace.api.body import decode
from headrace.api.wire import sse
from headrace.api.wire.anthropic import AnthropicWire, envelope_of
from headrace.api.wire.anthropic_fold import MessagesFold, MessagesWhole
from headrace.api.wire.anthropic_request import INT64_MAX, MessagesRequest, Request, job_of, stops_of, think_of
from headrace.api.wire.ends import OneFrame
from headrace.api.wire.format import Parsed
from headrace.broker.errors import BadRequest, EngineFailed
from headrace.broker.messages import ReadEntry, Result, Sampling, View
from headrace.broker.settings import ApiSettings

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, INT64_MAX),
    ("temperature", 0, 1),
    ("top_p", 0, 1),
    ("top_k", 0, 2**31 - 1),
    ("n", 1, 1),
)
_messages = msgspec.json.Decoder(MessagesRequest)
_count = msgspec.json.Decoder(Request)


class AnthropicMessages(AnthropicWire):
    """Anthropic's Messages; see `format.Format`."""

    name: str = "anthropic.messages"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_messages, body, limits)
        for name, low, high in _RANGES:
            value = getattr(request, name)
            if value is not None and not low <= value <= high:
                raise BadRequest(f"{name} must be from {low} to {high}.", param=name)
        if request.service_tier not in (None, "auto", "standard_only"):
            raise BadRequest("service_tier must be auto or standard_only.", param="service_tier")
        job = job_of(
            request,
            limits,
            max_tokens=request.max_tokens,
            stop=stops_of(request.stop_sequences or [], limits),
            sampling=Sampling(request.temperature, request.top_p, request.top_k),
            think=think_of(request.thinking, request.max_tokens),
        )
        is_omitted = request.thinking is not None and request.thinking.display == "omitted"
        return Parsed(job, stream=bool(request.stream), options={"omit_thinking": True} if is_omitted else {})

    def fold(self, job_id: str, view: View) -> MessagesFold:
        return MessagesFold(job_id, view)

    def whole(self, job_id: str, view: View) -> MessagesWhole:
        return MessagesWhole(job_id, view)


class AnthropicCountTokens(AnthropicWire):
    """The tokens of a prompt, tools and system prompt included, as its model counts them."""

    name: str = "anthropic.count_tokens"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_count, body, limits)
        return Parsed(job_of(request, limits, kind="count", think=think_of(request.thinking, INT64_MAX)), stream=False)

    def fold(self, job_id: str, view: View) -> OneFrame:
        return OneFrame(self.whole(job_id, view), partial(envelope_of, job_id))

    def whole(self, job_id: str, view: View) -> CountWhole:
        return CountWhole()


class CountWhole:
    """A count; see `format.Whole`."""

    def __init__(self) -> None:
        self._tokens: int | None = None

    def feed(self, entry: ReadEntry) -> None:
        for event in entry.events:
            if isinstance(event, Result):
                self._tokens = event.data["tokens"]

    def body(self) -> bytes:
        if self._tokens is None:
            raise EngineFailed("the tokens were not counted")
        return sse.encode({"input_tokens": self._tokens})
