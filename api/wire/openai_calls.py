"""Calls on the way out: put together from their deltas, and shown as chat's `tool_calls`."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.broker.messages import Delta, ToolCall, ToolCallDelta


def call_id(call: ToolCallDelta, job_id: str, choice: int) -> str:
    """The id of a call, from its first delta; one is made, the same for every reader, if its engine gave none."""
    return call.id or f"call_{job_id}_{choice}_{call.index}"


def is_first(call: ToolCallDelta) -> bool:
    """Does a call begin here?"""
    return bool(call.id or call.name)


class Calls:
    """The calls of one choice, put together; they are in the order of their indexes."""

    def __init__(self, job_id: str, choice: int) -> None:
        self._job_id = job_id
        self._choice = choice
        self._heads: dict[int, tuple[str, str]] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, calls: Iterable[ToolCallDelta]) -> None:
        for call in calls:
            if is_first(call) or call.index not in self._heads:
                self._heads[call.index] = call_id(call, self._job_id, self._choice), call.name
            self._arguments.setdefault(call.index, []).append(call.arguments)

    def whole(self) -> list[ToolCall]:
        return [
            ToolCall(*self._heads[index], arguments="".join(parts)) for index, parts in sorted(self._arguments.items())
        ]


def shown_calls(event: Delta, job_id: str) -> list[dict[str, object]]:
    """The `tool_calls` of a chunk: id, type and name once, then more of the arguments under the same index."""
    shown: list[dict[str, object]] = []
    for call in event.tool_calls or ():
        if is_first(call):
            function = {"name": call.name, "arguments": call.arguments}
            own = call_id(call, job_id, event.choice)
            shown.append({"index": call.index, "id": own, "type": "function", "function": function})
        else:
            shown.append({"index": call.index, "function": {"arguments": call.arguments}})
    return shown
