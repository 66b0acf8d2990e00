"""What is fuzzed, and what must hold for any bytes at all: each target is a function that raises if it does not.

A body is a job that can be stored, or a refusal that can be said. A stream is the same events wherever it is cut, in
the remote engine and in the client, and what is made of them is steps or a named error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec

from headrace.api.openapi import BODIES
from headrace.api.wire import BY_NAME, bounds
from headrace.api.wire.format import Format
from headrace.api.wire.ollama import Load
from headrace.api.wire.openai_extras import HARMLESS
from headrace.api.wire.tgi import TGI
from headrace.broker.errors import BadRequest, HeadraceError
from headrace.broker.messages import Job, View, decode_job, encode
from headrace.broker.settings import ApiSettings
from headrace.client.sse import Parser
from headrace.workers.engines.remote_frames import Event, Frames, LineFrames, SseFrames
from headrace.workers.engines.remote_llamacpp import LlamacppReader
from headrace.workers.engines.remote_ollama import OllamaReader
from headrace.workers.engines.remote_openai import OpenaiReader
from headrace.workers.engines.remote_tgi import TgiReader
from headrace.workers.engines.remote_wire import Reader
from tests.api.bodies import VALID

LIMITS = ApiSettings()
PATHS: tuple[str, ...] = tuple(path for path, body in BODIES.items() if body.format)
READERS: tuple[tuple[type[Frames], type[Reader]], ...] = (
    (SseFrames, OpenaiReader),
    (SseFrames, LlamacppReader),
    (SseFrames, TgiReader),
    (LineFrames, OllamaReader),
)


def form_of(path: str) -> Format:
    return TGI("whole") if path == "/generate" else BY_NAME[BODIES[path].format or ""]


def body(data: bytes) -> None:
    """The first byte chooses the route; the rest is its body."""
    path = PATHS[data[0] % len(PATHS)] if data else PATHS[0]
    form = form_of(path)
    try:
        parsed = form.parse(data[1:], LIMITS)
        bounds.check(parsed.job, LIMITS)
    except BadRequest as error:
        json.loads(form.error_body(error))
        assert len(error.message) < 1000, "a refusal that repeats its request"
        return
    except Load:
        return
    view = View("anybody", parsed.job.model, form.name, options=parsed.options)
    try:
        stored = encode(parsed.job)
        encode(view)
    except OverflowError:  # a whole number of more than 64 bits where anything may stand: refused at admission
        return
    assert decode_job(stored) == msgspec.convert(msgspec.to_builtins(parsed.job), Job)


def fields(data: bytes) -> None:
    """The same for a valid body with fields of any route's set to anything, as deep as the bytes say."""
    if not data:
        return
    reading = iter(data[1:])
    number = data[0] % len(PATHS)
    said = dict(VALID[PATHS[number]])
    for _ in range(1 + next(reading, 0) % 4):
        said[NAMES[(next(reading, 0) * 256 + next(reading, 0)) % len(NAMES)]] = _value(reading, 4)
    body(bytes([number]) + json.dumps(said).encode())


def _value(reading: Iterator[int], depth: int) -> object:
    kind = next(reading, 0)
    if kind < 160 or depth == 0:
        return VALUES[kind % len(VALUES)]
    inner = [_value(reading, depth - 1) for _ in range(kind % 4)]
    if kind < 200:
        return inner
    return {NAMES[next(reading, 0) * 7 % len(NAMES)]: each for each in inner}


def remote(data: bytes) -> None:
    """The first byte chooses the server's kind, the second where its stream is cut."""
    if len(data) < 2:
        return
    make_frames, make_reader = READERS[data[0] % len(READERS)]
    stream = data[2:]
    whole = _fed(make_frames(), [stream])
    assert whole == _fed(make_frames(), _cut(stream, data[1])), "other events where it is cut"
    reader = make_reader()
    try:
        for event in whole:
            if event.data.strip():
                reader.read(event)
            if reader.is_over:
                break
        reader.end()
    except HeadraceError:
        pass


def client(data: bytes) -> None:
    """The first byte says where the stream is cut. Two parsers of one standard must see the same."""
    if not data:
        return
    stream = data[1:]
    whole = Parser().feed(stream)
    parser = Parser()
    assert whole == [event for piece in _cut(stream, data[0]) for event in parser.feed(piece)]
    theirs = _fed(SseFrames(), [stream])
    assert [event.data for event in whole] == [event.data.decode(errors="replace") for event in theirs]


def _fed(frames: Frames, pieces: Sequence[bytes]) -> list[Event]:
    return [event for piece in pieces for event in frames.feed(piece)]


def _cut(stream: bytes, by: int) -> list[bytes]:
    """In pieces of up to 16 bytes, some of them empty."""
    ends = [0]
    while ends[-1] < len(stream):
        by = (by * 167 + 13) % 256
        ends.append(min(len(stream), ends[-1] + by % 17))
    return [stream[start:end] for start, end in pairwise(ends)]


def _names() -> Iterator[str]:
    """Of the fields of all bodies and of what stands in them."""
    _, components = msgspec.json.schema_components([each.type for each in BODIES.values()])
    for component in components.values():
        yield from component.get("properties", {})
    yield from HARMLESS


NAMES: tuple[str, ...] = tuple(sorted(set(_names())))
VALUES: tuple[object, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        5,
        1024,
        2**31,
        2**53,
        2**63 - 1,
        -(2**63),
        2**64,
        10**40,
        0.5,
        -0.0,
        1e308,
        -1e-308,
    ),
    *(
        "",
        "a",
        "user",
        "assistant",
        "tool",
        "system",
        "function",
        "text",
        "json",
        "json_schema",
        "regex",
        "auto",
        "required",
    ),
    *(
        "m",
        "tool_use",
        "tool_result",
        "thinking",
        "enabled",
        "none",
        "low",
        "5m",
        "\u2028",
        "\0",
        "a" * 300,
        "{",
        "(a{9}){9}",
    ),
    *(
        [],
        {},
        [0],
        [[1]],
        ["a"],
        {"a": 1},
        {"type": "object"},
        [{"type": "text", "text": "a"}],
        [{"role": "user", "content": "a"}],
    ),
    *({"type": "function", "function": {"name": "f"}}, {"name": "f"}, {"schema": {}}, {"1": 1.5}, [[1, False]]),
)


def bodies() -> Iterator[bytes]:
    """Where the search begins: a valid body of every route, and one with much in it."""
    turns = [
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": []},
        {"role": "user", "content": "b"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    more = {"messages": turns, "tools": [tool], "stop": ["x"], "logit_bias": {"1": 2.5}, "options": {"num_predict": 3}}
    for number, path in enumerate(PATHS):
        yield bytes([number]) + json.dumps(VALID[path]).encode()
        yield bytes([number]) + json.dumps({**VALID[path], **more, "stream": True, "seed": 2**63 - 1}).encode()


def streams() -> Iterator[bytes]:
    """A short answer of each kind of server."""
    choice = '{"delta":{"content":"é","tool_calls":[]},"finish_reason":"stop","logprobs":{"content":[]}}'
    chunk = f'{{"choices":[{choice}]}}'
    yield (
        b"\0\x07data: "
        + chunk.encode()
        + b'\n\ndata: {"choices":[],"usage":{"prompt_tokens":1}}\r\n\r\ndata: [DONE]\n\n'
    )
    yield b'\1\x09event: error\rdata: {"content":"a","stop":true,"stop_type":"eos","tokens_predicted":3}\r\r'
    yield b'\2\x0b: ping\n\ndata:{"token":{"id":1,"text":"a"},"details":{"finish_reason":"length"}}\n\n'
    yield b'\3\x0d{"message":{"content":"a","tool_calls":[{"function":{"name":"f","arguments":{}}}]}}\n{"done":true}\n'


def events() -> Iterator[bytes]:
    """Streams for the client's parser."""
    yield b"\1\xef\xbb\xbfid: a.1\nevent: x\ndata: one\ndata: two\n\n: c\r\rdata\r\n\r\nretry: 1\n\n"


Target = Callable[[bytes], None]
TARGETS: dict[str, tuple[Target, Callable[[], Iterator[bytes]]]] = {
    "body": (body, bodies),
    "fields": (fields, bodies),
    "remote": (remote, streams),
    "client": (client, events),
}
