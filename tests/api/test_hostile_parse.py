"""Bodies of up to 4 MiB that are made to keep their reader busy, and numbers that no engine should see."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headrace.api.openapi import BODIES
from headrace.api.wire import BY_NAME, bounds
from headrace.api.wire.format import Format, Parsed
from headrace.api.wire.ollama import Load
from headrace.api.wire.tgi import TGI
from headrace.broker.errors import BadRequest
from headrace.broker.messages import encode
from headrace.broker.settings import ApiSettings
from tests.api.bodies import VALID

LIMITS = ApiSettings()
SIZE = LIMITS.max_body_bytes
USER = '{"role":"user","content":"hi"}'
CHAT = f'{{"model":"m","max_tokens":1,"messages":[{USER}],'
TURNS = '{"model":"m","max_tokens":1,"messages":['
SCHEMA = f'{CHAT}"response_format":{{"type":"json_schema","json_schema":{{"schema":'


def full(start: str, one: str, end: str, most: int = 100_000) -> bytes:
    """As many of `one` as a body holds, or `most`: more objects than that are refused before they are read."""
    count = min(most, (SIZE - len(start) - len(end)) // (len(one) + 1))
    return (start + ",".join([one] * count) + end).encode()


def numbered(start: str, one: str, end: str, count: int) -> bytes:
    return (start + ",".join(one % index for index in range(count)) + end).encode()


TEXT = '{"type":"text","text":"a"}'
OF_USER, OF_ASSISTANT = (TURNS + f'{{"role":"{role}","content":[' for role in ("user", "assistant"))
CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"
CALLS = '{"model":"m","messages":[{"role":"assistant","tool_calls":['
ASKED = full(CALLS, '{"function":{"name":"b"}}', "]},", 45_000)
PATTERNS = SCHEMA + '{"a":['
INPUT = '{"model":"m","input":['
THOUGHT = '{"type":"reasoning","content":[{"type":"text","text":"%s"}]}' % ("a" * 900)
CALL = '{"type":"function_call","call_id":"a","name":"b","arguments":""}'
BUSY: dict[str, tuple[str, bytes]] = {
    "blocks of text": (
        "/v1/messages",
        full(OF_USER, TEXT, "]}]}", 99_000),
    ),
    "blocks of the assistant's": (
        "/v1/messages",
        full(OF_ASSISTANT, TEXT, "]}]}", 99_000),
    ),
    "turns of one role": ("/v1/messages", full(TURNS, '{"role":"user","content":"%s"}' % ("a" * 900), "]}", 4096)),
    "turns with calls": (
        "/v1/messages",
        full(
            OF_ASSISTANT,
            '{"type":"tool_use","id":"a","name":"b"}',
            f"]}},{USER}]}}",
            90_000,
        ),
    ),
    "tools of Anthropic's": ("/v1/messages", full(CHAT + '"tools":[', '{"name":"a","input_schema":{}}', "]}", 49_000)),
    "calls that are answered by id": (
        "/api/chat",
        full(CALLS, '{"function":{"name":"b"}}', "]},", 45_000)
        + full("", '{"role":"tool","tool_call_id":"z"}', "]}", 4095),
    ),
    "calls that are answered by name": (
        "/api/chat",
        full(CALLS, '{"function":{"name":"b"}}', "]},", 45_000)
        + full("", '{"role":"tool","tool_name":"z"}', "]}", 4095),
    ),
    "calls that are answered in turn": (
        "/api/chat",
        full(CALLS, '{"id":"a","function":{"name":"b"}}', "]},", 45_000) + full("", '{"role":"tool"}', "]}", 4095),
    ),
    "tools of Ollama's": ("/api/chat", full(CHAT + '"tools":[', '{"function":{"name":"a"}}', "]}", 49_000)),
    "parts": (
        CHATS,
        full(OF_USER, TEXT, "]}]}", 99_000),
    ),
    "tools": (
        CHATS,
        numbered(CHAT + '"tools":[', '{"type":"function","function":{"name":"a%d"}}', "]}", 40_000),
    ),
    "biases": (CHATS, numbered(CHAT + '"logit_bias":{', '"%d":1', "}}", 300_000)),
    "messages": (CHATS, full(TURNS, USER, "]}", 10_000)),
    "a schema of many values": (CHATS, full(SCHEMA + '{"enum":[', "1", "]}}}}", 2_000_000)),
    "patterns of brackets": (
        CHATS,
        full(PATTERNS, '{"pattern":"%s"}' % ("[" * 4000), "]}}}}"),
    ),
    "patterns of repetitions": (
        CHATS,
        full(PATTERNS, '{"pattern":"%s"}' % ("{1," * 1300), "]}}}}"),
    ),
    "a schema in a text": (CHATS, full(CHAT + '"guided_json":"[', "[]", ']"}', 1_300_000)),
    "a deep schema in a text": (CHATS, (CHAT + '"guided_json":"' + "[" * 3_000_000 + '"}').encode()),
    "a long pattern": (CHATS, (CHAT + '"guided_regex":"' + "a{9}" * 900_000 + '"}').encode()),
    "a deep grammar": ("/completion", b'{"prompt":"a","grammar":"' + b"(" * 3_000_000 + b'"}'),
    "tokens": ("/completion", full('{"prompt":[', "1", "]}", SIZE)),
    "thoughts": (
        RESPONSES,
        full(
            '{"model":"m","input":[',
            '{"type":"reasoning","content":[{"type":"text","text":"%s"}]}' % ("a" * 900),
            "]}",
            4096,
        ),
    ),
    "calls": (
        RESPONSES,
        full(INPUT, CALL, "]}", 4096),
    ),
    "inputs": ("/v1/embeddings", full('{"model":"m","input":[', '"a"', "]}", SIZE)),
    "a long input": ("/generate", b'{"inputs":"' + b"a" * (SIZE - 20) + b'"}'),
}


def form_of(path: str) -> Format:
    return BY_NAME[BODIES[path].format or ""] if path != "/generate" else TGI("whole")


def read(path: str, body: bytes) -> Parsed:
    parsed = form_of(path).parse(body, LIMITS)
    bounds.check(parsed.job, LIMITS)
    return parsed


@pytest.mark.parametrize("name", BUSY)
def test_no_body_keeps_its_reader_busy(name: str) -> None:
    """They take up to 0.3 s; what is quadratic takes 20 s."""
    path, body = BUSY[name]
    assert len(body) <= SIZE
    began = time.process_time()
    with contextlib.suppress(BadRequest):
        read(path, body)
    assert time.process_time() - began < 1.5


LONG = "1" + "0" * 4999
NUMBERS = (
    LONG,
    f"-{LONG}",
    f"0.{LONG}",
    "1e308",
    "-1e308",
    "1e999",
    "1e-999",
    str(2**63),
    str(-(2**63) - 1),
    "NaN",
    "Infinity",
)
NOT_NUMBERS = ("true", '"1"', "[1]", "{}", '"\\ud800"')
JSON = [path for path, body in BODIES.items() if body.format]


@pytest.mark.parametrize("path", JSON)
def test_no_number_is_passed_on_that_is_none_or_too_large(path: str) -> None:
    for where in numbers_of(BODIES[path].type):
        for value in (*NUMBERS, *NOT_NUMBERS):
            body = with_value(VALID[path], where, value)
            try:
                parsed = form_of(path).parse(body, LIMITS)
            except BadRequest as error:
                assert len(error.message) < 300 and LONG not in error.message
                continue
            except Load:
                continue
            assert value not in (LONG, f"-{LONG}", "1e999", "NaN", "Infinity", '"\\ud800"'), where
            encode(parsed.job)


def numbers_of(kind: type[msgspec.Struct], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where a body may have a number, inside of objects too."""
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]  # it is of a Struct
        kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        if any(isinstance(each, msgspec.inspect.IntType | msgspec.inspect.FloatType) for each in kinds):
            yield (*before, field.encode_name)
        for each in kinds:
            if isinstance(each, msgspec.inspect.StructType):
                yield from numbers_of(each.cls, (*before, field.encode_name))


def with_value(body: dict[str, Any], where: tuple[str, ...], value: str) -> bytes:
    """The body with JSON text at a place, which the standard library would refuse to write."""
    inner: Any = "@"
    for name in reversed(where):
        inner = {name: inner}
    return json.dumps({**body, **inner}).replace('"@"', value).encode()


NO_UTF8 = (b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80")
NO_TEXTS = (b"\\ud800", b"\\udc00\\ud800", b"\\ud83d", b"\n", b"\0", b"\\x41")


@pytest.mark.parametrize("path", JSON)
def test_no_text_is_passed_on_that_is_no_unicode(path: str) -> None:
    """Bytes that are no UTF-8 are refused anywhere, and half a pair of surrogates where a text is read."""
    valid = json.dumps(VALID[path]).encode()
    for text in NO_UTF8:
        for body in (b'{"x":"%b",' % text, b'{"%b":1,' % text, b'{"x":{"y":["%b"]},' % text):
            with pytest.raises(BadRequest, match="JSON"):
                form_of(path).parse(body + valid[1:], LIMITS)
    for text in NO_TEXTS:
        for name, value in VALID[path].items():
            if isinstance(value, str):
                body = valid.replace(b'"%b": "' % name.encode(), b'"%b": "%b' % (name.encode(), text))
                with pytest.raises(BadRequest, match="JSON"):
                    form_of(path).parse(body, LIMITS)


@pytest.mark.parametrize("path", JSON)
def test_of_a_field_that_stands_twice_the_last_one_counts_everywhere(path: str) -> None:
    """Also in the second look, at fields that are refused: no order of the two gets one past."""
    plain = form_of(path).parse(json.dumps(VALID[path]).encode(), LIMITS)
    for name, value in VALID[path].items():
        if isinstance(value, str):
            body = b'{"%b":"other",%b' % (name.encode(), json.dumps(VALID[path]).encode()[1:])
            assert form_of(path).parse(body, LIMITS) == plain
    for refused in (b"[5]", b"5", b"true"):
        for body in (b'{"chat_template":null,"n_discard":0,"chat_template":%b,' % refused,):
            if path.startswith("/v1/chat") or path == "/v1/completions":
                with pytest.raises(BadRequest, match="chat_template"):
                    form_of(path).parse(body + json.dumps(VALID[path]).encode()[1:], LIMITS)
