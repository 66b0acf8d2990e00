"""What a request in Anthropic's format may say, and the job that it means.

Fields that would change the answer and cannot be honoured are refused; `docs` list those that are hints.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from headrace.api.wire.anthropic_prompt import Block, Turn, prompt
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Job, JsonSchema, Tool, ToolChoice
from headrace.broker.settings import ApiSettings

INT64_MAX = 2**63 - 1
MIN_THINKING_TOKENS = 1024

_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_THINK = {"enabled": True, "disabled": False, "adaptive": None}
_UNSUPPORTED = ("container", "context_management", "diagnostics", "inference_geo", "mcp_servers", "output_format")


class ToolParam(Struct, frozen=True):
    """A tool; those that run at Anthropic have a type of their own and no schema."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None


class ToolChoiceParam(Struct, frozen=True):
    """Which tool the model is to call."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True):
    """Whether the model is to reason first."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Struct, frozen=True):
    """What the answer must look like."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct, frozen=True):
    """`effort` is a hint."""

    format: OutputFormat | None = None


class Metadata(Struct, frozen=True):
    """For the caller's own bookkeeping."""

    user_id: str | None = None


class Request(Struct, frozen=True, kw_only=True):
    """What both routes have. The fields typed Any are not supported, see `_UNSUPPORTED`."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    output_format: Any = None


class MessagesRequest(Request, frozen=True, kw_only=True):
    """The fields of the route that generates."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    n: int | None = None


def job_of(request: Request, limits: ApiSettings, **fields: Any) -> Job:
    if not request.model:
        raise BadRequest("model must not be empty.", param="model")
    for name in _UNSUPPORTED:
        if getattr(request, name):
            raise BadRequest(f"{name} is not supported here.", param=name)
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or [])]
    choice = request.tool_choice or ToolChoiceParam("auto")
    chat = prompt(request.system, request.messages, limits)
    return Job(
        "",
        request.model,
        chat,
        tools=tools,
        tool_choice=_tool_choice(choice, {tool.name for tool in tools}),
        tool_name=choice.name if choice.type == "tool" else None,
        parallel_tool_calls=None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use,
        constraint=_constraint(request.output_config),
        **fields,
    )


def _tool(tool: ToolParam, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise BadRequest(f"{where}.type: only custom tools are supported here.", param=f"{where}.type")
    for name in ("name", "input_schema"):
        if getattr(tool, name) in (None, ""):
            raise BadRequest(f"{where}.{name} is missing.", param=f"{where}.{name}")
    for name in ("strict", "defer_loading", "input_examples"):
        if getattr(tool, name):
            raise BadRequest(f"{where}.{name} is not supported here.", param=f"{where}.{name}")
    if tool.allowed_callers not in (None, ["direct"]):
        raise BadRequest(f"{where}.allowed_callers is not supported here.", param=f"{where}.allowed_callers")
    return Tool(tool.name or "", tool.description or "", tool.input_schema or {})


def _tool_choice(choice: ToolChoiceParam, names: set[str]) -> ToolChoice:
    if choice.type not in _CHOICES:
        raise BadRequest("tool_choice.type must be auto, any, tool or none.", param="tool_choice.type")
    if choice.type == "tool" and choice.name not in names:
        raise BadRequest("tool_choice.name must be the name of one of the tools.", param="tool_choice.name")
    if choice.type == "any" and not names:
        raise BadRequest("tool_choice needs tools.", param="tool_choice")
    return _CHOICES[choice.type]


def think_of(thinking: Thinking | None, max_tokens: int) -> bool | None:
    """None leaves it to the model. A budget is checked, and then a hint: no engine here can keep to one."""
    if thinking is None:
        return None
    if thinking.type not in _THINK:
        raise BadRequest("thinking.type must be enabled, disabled or adaptive.", param="thinking.type")
    if thinking.display not in (None, "summarized", "omitted"):
        raise BadRequest("thinking.display must be summarized or omitted.", param="thinking.display")
    if thinking.type == "enabled" and not MIN_THINKING_TOKENS <= (thinking.budget_tokens or 0) < max_tokens:
        raise BadRequest(
            f"thinking.budget_tokens must be at least {MIN_THINKING_TOKENS} and less than max_tokens.",
            param="thinking.budget_tokens",
        )
    return _THINK[thinking.type]


def _constraint(config: OutputConfig | None) -> JsonSchema | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema":
        raise BadRequest("output_config.format.type must be json_schema.", param="output_config.format.type")
    if config.format.schema is None:
        raise BadRequest("output_config.format.schema is missing.", param="output_config.format.schema")
    return JsonSchema(config.format.schema)


def stops_of(stops: list[str], limits: ApiSettings) -> list[str]:
    if len(stops) > limits.max_stops:
        raise BadRequest(f"stop_sequences must have at most {limits.max_stops} strings.", param="stop_sequences")
    if not all(1 <= len(each) <= limits.max_stop_chars for each in stops):
        raise BadRequest(
            f"stop_sequences must have from 1 to {limits.max_stop_chars} characters each.", param="stop_sequences"
        )
    return stops
