"""`POST /v1/responses`: OpenAI's Responses, read.

What a response object says of its request is made here, once, and kept in the view. Going on from an earlier response
is not done here, since it takes the broker: see `api/responses.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, structs

from headrace.api.body import decode
from headrace.api.wire import openai_extras, openai_think, openai_tools, sse
from headrace.api.wire.checks import INT64_MAX
from headrace.api.wire.format import Parsed
from headrace.api.wire.openai import (
    OpenAIWire,
    Sampled,
    band,
    check_range,
    check_stream_options,
    job_of,
    shown_error,
)
from headrace.api.wire.openai_constraint import ResponseFormat, of_format
from headrace.api.wire.openai_tools import Choice, FlatTool
from headrace.api.wire.responses_fold import ResponsesFold, ResponsesWhole
from headrace.api.wire.responses_input import Item, messages_of
from headrace.broker.errors import BadRequest, HeadraceError
from headrace.broker.messages import Chat, Constraint, Job, Message, View
from headrace.broker.settings import ApiSettings

RESPONSE_ID = "resp_"
MAX_METADATA = 16

_REFUSED: dict[str, tuple[object, ...]] = {
    "context_management": ([],),
    "conversation": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "messages": (),
    "moderation": (),
    "n": (1,),
    "previous_response": (),
    "prompt": (),
    "response_format": (),
    "truncation": ("disabled",),
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
"""What `include` may ask for. Thoughts are in the response in the open, so nothing is to be encrypted."""


class TextOptions(Struct, frozen=True):
    """`verbosity` is no constraint, and only one of its values changes nothing."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(Struct, frozen=True):
    """`summary`: the thoughts are shown as a summary. Nobody shortens them here, so it cannot be `concise`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Sampled, frozen=True, kw_only=True):
    """The fields of this route."""

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None


_decoder = msgspec.json.Decoder(ResponsesRequest)
_fields = set(ResponsesRequest.__struct_fields__) - {"response_format"}
_check_extras = openai_extras.checker(_fields, _REFUSED)


class Responses(OpenAIWire):
    """OpenAI's Responses; see `format.Format`. Its events have names, and its last one says that it is the last."""

    name: str = "openai.responses"
    joins_text: bool = False  # its frames are numbered
    terminator: bytes = b""
    fields: Mapping[str, str] = {
        "logprobs": "top_logprobs",
        "messages": "input",
        "prompt": "input",
        "response_format": "text.format",
        "think": "reasoning.effort",
    }

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_decoder, body, limits)
        _check_extras(body)
        _check(request)
        messages = messages_of(request.input, limits)
        if request.instructions:
            messages.insert(0, Message("system", request.instructions))
        use = openai_tools.of_responses(request.tools or [], request.tool_choice)
        job = job_of(request, Chat(messages), limits)
        reasoning = request.reasoning or Reasoning()
        job = structs.replace(
            job,
            max_tokens=request.max_output_tokens,
            logprobs=_logprobs(request),
            tools=use.tools,
            tool_choice=use.choice,
            tool_name=use.name,
            parallel_tool_calls=request.parallel_tool_calls if use.tools else None,
            constraint=_constraint(request, job),
            think=openai_think.of_effort(reasoning.effort, "reasoning.effort"),
        )
        is_stored = request.store is not False
        return Parsed(
            job,
            stream=bool(request.stream),
            band=band(request.service_tier),
            options={"response": _said(request), "is_stored": is_stored},
            is_background=bool(request.background),
            is_kept=is_stored,
        )

    def fold(self, job_id: str, view: View) -> ResponsesFold:
        return ResponsesFold(job_id, view, self.fields)

    def whole(self, job_id: str, view: View) -> ResponsesWhole:
        return ResponsesWhole(job_id, view, self.fields)

    def frame(self, position: str, payload: bytes) -> bytes:
        """Every payload begins with its type, which is the event's name."""
        name = payload[9 : payload.index(b'"', 9)]
        return b"event: %b\n%b" % (name, sse.frame(position, payload))

    def error_frame(self, error: HeadraceError) -> bytes:
        """An error of the pod's own; it has no sequence number, since the log does not have it.

        It begins with its type, as all events do. Clients look for `error`, as other routes have it; the documentation
        has the other members.
        """
        shown = shown_error(error, self.fields)
        said = {name: shown[name] for name in ("code", "message", "param")}
        return sse.encode({"type": "error", **said, "error": shown})


def _check(request: ResponsesRequest) -> None:
    check_range(request, "max_output_tokens", 1, INT64_MAX)
    check_range(request, "max_tool_calls", 1, INT64_MAX)
    check_range(request, "top_logprobs", 0, 20)
    check_stream_options(request)
    for index, name in enumerate(request.include or []):
        if name not in _INCLUDED:
            where = f"include[{index}]"
            raise BadRequest(f"{where} must be one of {', '.join(_INCLUDED)}.", param=where)
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise BadRequest("text.verbosity is not supported by this server.", param="text.verbosity")
    for name in ("summary", "generate_summary"):
        if getattr(request.reasoning, name, None) not in (None, "auto", "detailed"):
            raise BadRequest(f"reasoning.{name} must be auto or detailed.", param=f"reasoning.{name}")
    if request.background and request.store is False:
        raise BadRequest("background needs store.", param="background")
    _check_metadata(request.metadata or {})


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise BadRequest(
            f"metadata has at most {MAX_METADATA} pairs, of keys up to 64 and values up to 512 characters.",
            param="metadata",
        )


def _logprobs(request: ResponsesRequest) -> int | None:
    """Alternatives per token; asking for some is asking for log-probabilities."""
    is_asked = _LOGPROBS in (request.include or []) or request.top_logprobs
    return (request.top_logprobs or 0) if is_asked else None


def _constraint(request: ResponsesRequest, job: Job) -> Constraint | None:
    """`text.format`, which has its schema beside its type; or what another server's field has asked for."""
    form = request.text.format if request.text else None
    if form is None:
        return job.constraint
    try:
        read = msgspec.convert(form, ResponseFormat)
    except msgspec.ValidationError as error:
        raise BadRequest(f"text.format: {error}.", param="text.format") from error
    if read.type == "json_schema" and read.schema is None:
        raise BadRequest("text.format.schema is missing.", param="text.format.schema")
    constraint = of_format(read, "text.format")
    if constraint is not None and job.constraint is not None:
        raise BadRequest("text.format cannot be combined with another constraint.", param="text.format")
    return constraint or job.constraint


def _said(request: ResponsesRequest) -> dict[str, Any]:
    """The members of a response object that repeat its request."""
    reasoning = request.reasoning or Reasoning()
    choice = request.tool_choice
    return {
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "service_tier": request.service_tier or "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": (request.text.format if request.text else None) or {"type": "text"}},
        "tool_choice": {"type": "function", "name": choice.name} if isinstance(choice, Choice) else choice or "auto",
        "tools": [
            {**structs.asdict(tool), "parameters": tool.parameters or {}, "strict": False}
            for tool in request.tools or []
        ],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
