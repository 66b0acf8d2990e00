"""Anthropic's and Ollama's formats as tests speak them: what to ask with, and how to read an answer strictly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

HI = [{"role": "user", "content": "hi"}]

_EVENT = re.compile(
    rb"event: ([a-z_]+)\n(?:id: ([0-9a-f]{32}\.[0-9]+-[0-9]+(?:\.[0-9]+)?)\n)?data: ([^\r\n]+)\n",
)


class Frame(NamedTuple):
    """One frame and its position, empty where it has none."""

    id: str
    said: dict[str, Any]


class Said(NamedTuple):
    """An answer, streamed or whole: its text, why it ended, the tokens of prompt and answer."""

    text: str
    reason: str | None
    prompt_tokens: int
    tokens: int


class Spoken(NamedTuple):
    """One format."""

    name: str
    path: str
    body: dict[str, Any]
    media_type: str
    read: Callable[[bytes], list[Frame]]
    """The frames of a stream, heartbeats left out; fails if a byte of it is not as it must be."""
    text: Callable[[dict[str, Any]], str]
    """What one frame adds to the text."""
    of_stream: Callable[[list[dict[str, Any]]], Said]
    of_whole: Callable[[dict[str, Any]], Said]
    error: Callable[[dict[str, Any]], str]
    """The message of an error; fails if that is not the format's envelope."""
    beats: Callable[[bytes], int]
    reasons: tuple[str, str, str]
    """How it says that the model ended, that a limit did, that a stop string did."""

    def asking(self, *, limit: int | None = None, stop: Any = None, **fields: Any) -> dict[str, Any]:
        """A request body."""
        if self.name == "anthropic.messages":
            more = {"max_tokens": limit or 1000, **({} if stop is None else {"stop_sequences": stop})}
        else:
            more = {"options": {"num_predict": limit, "stop": stop}}
        return {**self.body, **more, **fields}


# -- Anthropic --------------------------------------------------------------------------------------------------------


def read_events(body: bytes) -> list[Frame]:
    frames = []
    *blocks, rest = body.split(b"\n\n")
    assert rest == b"", f"an unterminated block: {rest!r}"
    for block in blocks:
        found = _EVENT.fullmatch(block + b"\n")
        assert found is not None, f"not an event: {block!r}"
        said = json.loads(found[3])
        assert said["type"] == found[1].decode()
        if said["type"] != "ping":
            frames.append(Frame((found[2] or b"").decode(), said))
    return frames


def of_events(frames: list[dict[str, Any]]) -> Said:
    """Reads as the official client does: blocks are put together by their indexes."""
    first, last = frames[0], frames[-1]
    assert (first["type"], last["type"]) == ("message_start", "message_stop")
    blocks: list[dict[str, Any]] = []
    end: dict[str, Any] = {}
    for frame in frames[1:-1]:
        match frame["type"]:
            case "content_block_start":
                assert frame["index"] == len(blocks)
                blocks.append({**frame["content_block"], "json": ""})
            case "content_block_delta":
                delta, block = frame["delta"], blocks[frame["index"]]
                field = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
                name = field.get(delta["type"], "json")
                block[name] += delta.get(name, delta.get("partial_json"))
            case "message_delta":
                assert not end, "ended twice"
                end = frame
    stopped = [frame["index"] for frame in frames if frame["type"] == "content_block_stop"]
    assert stopped == list(range(len(blocks)))
    usage = end["usage"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return Said(text, end["delta"]["stop_reason"], _input(usage), usage["output_tokens"])


def of_message(body: dict[str, Any]) -> Said:
    text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
    return Said(text, body["stop_reason"], _input(body["usage"]), body["usage"]["output_tokens"])


def _input(usage: dict[str, Any]) -> int:
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


def anthropic_error(body: dict[str, Any]) -> str:
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return str(body["error"]["message"])


# -- Ollama -----------------------------------------------------------------------------------------------------------


def read_lines(body: bytes) -> list[Frame]:
    *lines, rest = body.split(b"\n")
    assert rest == b"", f"an unterminated line: {rest!r}"
    frames = []
    for line in lines:
        assert len(line.decode().splitlines()) == 1, f"not one line: {line!r}"
        said = json.loads(line)
        position = said.pop("id", "")
        if position or "error" in said:
            frames.append(Frame(position, said))
        else:
            assert said["done"] is False and not _text_of(said), "a heartbeat says nothing"
    return frames


def _text_of(said: dict[str, Any]) -> str:
    return str(said["message"]["content"] if "message" in said else said["response"])


def of_lines(frames: list[dict[str, Any]]) -> Said:
    *chunks, last = frames
    assert last["done"] is True and not any(chunk["done"] or "done_reason" in chunk for chunk in chunks)
    return of_object({**last}, "".join(map(_text_of, frames)))


def of_object(body: dict[str, Any], text: str | None = None) -> Said:
    assert body["done"] is True
    said = _text_of(body) if text is None else text
    return Said(said, body["done_reason"], body["prompt_eval_count"], body["eval_count"])


def ollama_error(body: dict[str, Any]) -> str:
    assert body.keys() == {"error"} and isinstance(body["error"], str)
    return str(body["error"])


def _beats_of_lines(body: bytes) -> int:
    return sum(b'"id":' not in line for line in body.splitlines())


MESSAGES = Spoken(
    name="anthropic.messages",
    path="/v1/messages",
    body={"model": "scripted", "messages": HI},
    media_type="text/event-stream",
    read=read_events,
    text=lambda said: str(said.get("delta", {}).get("text", "")),
    of_stream=of_events,
    of_whole=of_message,
    error=anthropic_error,
    beats=lambda body: body.count(b'event: ping\ndata: {"type":"ping"}\n\n'),
    reasons=("end_turn", "max_tokens", "stop_sequence"),
)
CHAT = Spoken(
    name="ollama.chat",
    path="/api/chat",
    body={"model": "scripted", "messages": HI},
    media_type="application/x-ndjson",
    read=read_lines,
    text=_text_of,
    of_stream=of_lines,
    of_whole=of_object,
    error=ollama_error,
    beats=_beats_of_lines,
    reasons=("stop", "length", "stop"),
)
GENERATE = CHAT._replace(name="ollama.generate", path="/api/generate", body={"model": "scripted", "prompt": "hi"})

ALL = (MESSAGES, CHAT, GENERATE)


def assert_continues(form: Spoken, rest: list[Frame], wanted: list[Frame]) -> None:
    """A reader that came back got what it had not. How text is cut into frames may differ, where a format joins it."""
    if form is MESSAGES:
        assert rest == wanted
        return
    told, due = ([frame for frame in frames if not form.text(frame.said)] for frames in (rest, wanted))
    assert told == due
    told_text, due_text = ("".join(form.text(frame.said) for frame in frames) for frames in (rest, wanted))
    assert told_text == due_text
