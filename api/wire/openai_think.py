"""Whether the model is to think first, in the words that OpenAI and the templates of open models have for it."""

from __future__ import annotations

from typing import Any

from headrace.broker.errors import BadRequest

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_SWITCHES = ("enable_thinking", "thinking")
"""What a template's own switch may be called."""


def of_effort(effort: str | None, where: str) -> bool | None:
    """`none` is no; any other effort is yes, and how much is the model's own."""
    if effort is None:
        return None
    if effort not in EFFORTS:
        raise BadRequest(f"{where} must be one of {', '.join(EFFORTS)}.", param=where)
    return effort != "none"


def of_chat(effort: str | None, kwargs: dict[str, Any] | None, enable_thinking: bool | None) -> bool | None:
    """One answer of three fields, `chat_template_kwargs` being one of them; raises BadRequest if they contradict."""
    said = {"reasoning_effort": of_effort(effort, "reasoning_effort"), "enable_thinking": enable_thinking}
    for name, value in (kwargs or {}).items():
        where = f"chat_template_kwargs.{name[:64]}"
        if name not in _SWITCHES:
            raise BadRequest(f"Only {' and '.join(_SWITCHES)} are supported of chat_template_kwargs.", param=where)
        if not isinstance(value, bool):
            raise BadRequest(f"{where} must be true or false.", param=where)
        said[where] = value
    given = {name: value for name, value in said.items() if value is not None}
    if len(set(given.values())) > 1:
        first, second = list(given)[:2]
        raise BadRequest(f"{second} contradicts {first}.", param=second)
    return next(iter(given.values()), None)
