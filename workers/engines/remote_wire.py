"""What all remote servers have in common: a request to send, and a reader that turns its events into steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from headrace.broker.errors import BadRequest, EngineFailed
from headrace.broker.messages import Job, ToolCallDelta
from headrace.workers.engines.protocol import Generation, Step
from headrace.workers.engines.remote_frames import Event, Frames

End = Literal["eos", "limit", "tool_calls"]
T = TypeVar("T")
MAX_LAST_N = 1 << 20
"""More tokens than any model's context has."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "logit_bias": ({},),
}
"""Values that change nothing, so that a server which has no such field needs not refuse them."""


class Reader(Protocol):
    """Turns the events of one sequence into steps.

    `read` raises what the server has said went wrong. `end` is what comes when the stream is over, or None if it was
    cut before its terminal event.
    """

    is_over: bool
    """Nothing that is still to come matters."""

    def read(self, event: Event) -> list[Step]: ...

    def end(self) -> Step | None: ...


class Request(NamedTuple):
    """One POST; `render` is a call that must be made before, whose answer's `prompt` is this one's."""

    path: str
    body: dict[str, Any]
    frames: Frames
    reader: Reader
    render: tuple[str, dict[str, Any]] | None = None


class Api(Protocol):
    """One kind of server."""

    probe: str
    """A path that answers 200 when the server is there."""
    tools: bool
    constraints: tuple[str, ...]

    def request(self, name: str, generation: Generation) -> Request:
        """Raises BadRequest, with `param`, for what such a server cannot be asked."""
        ...


class Tally:
    """Counts what a server says without token ids: pieces as they come, and the true number at the end."""

    def __init__(self) -> None:
        self.pieces = 0

    def step(
        self, text: str, reasoning: str | None = None, calls: list[ToolCallDelta] | None = None, **more: Any
    ) -> Step:
        counted = int(bool(text or reasoning or calls))
        self.pieces += counted
        return Step((), text=text, reasoning=reasoning or None, tool_calls=calls or None, untold=counted, **more)

    def last(self, end: End, prompt_tokens: int = 0, made: int | None = None, cached: int = 0) -> Step:
        correction = 0 if made is None else made - self.pieces
        return Step((), end=end, text="", untold=correction, prompt_tokens=prompt_tokens, cached_tokens=cached)


def refuse_sampling(job: Job, known: set[str]) -> None:
    """Raise BadRequest for a sampling value that such a server has no field for, unless it changes nothing."""
    for name in job.sampling.__struct_fields__:
        value = getattr(job.sampling, name)
        if name in known or value is None or value in NEUTRAL.get(name, ()):
            continue
        if name == "repeat_last_n" and job.sampling.repeat_penalty in (None, 1):
            continue
        raise BadRequest(f"the remote server has no field for {name}", param=name)


def refuse(job: Job, *fields: str) -> None:
    """Raise BadRequest if one of these fields of the job says anything."""
    params = {"constraint": "response_format"}
    for name in fields:
        if getattr(job, name) not in (None, False, []):
            param = params.get(name, name)
            raise BadRequest(f"the remote server cannot be asked for {param}", param=param)


def last_n_of(job: Job) -> int | None:
    """How far back repetitions count; what no context holds is all of it, -1: some servers make a buffer so long."""
    asked = job.sampling.repeat_last_n
    return -1 if asked is not None and asked > MAX_LAST_N else asked


def seed_of(generation: Generation) -> int | None:
    seed = generation.job.sampling.seed
    return None if seed is None else seed + generation.choice


def decode(event: Event, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(event.data, type=kind)
    except msgspec.MsgspecError as error:
        raise EngineFailed("the remote server sent what cannot be read") from error


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class Wrong(Struct):
    """An error as OpenAI's and llama.cpp's servers put it."""

    message: str = ""
    code: Any = None
    type: Any = None
    param: Any = None


def failure(wrong: Wrong | str) -> EngineFailed:
    """Of an error in the middle of a stream; what it says is for our log, not for the caller."""
    error = EngineFailed("the remote server failed while it worked on this request")
    error.__cause__ = RuntimeError(wrong if isinstance(wrong, str) else f"{wrong.code or wrong.type}: {wrong.message}")
    return error
