"""The client against a server that cuts its connections where the test says."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.client import Chunk, Client, ConnectionLost, RequestRefused, StreamFailed
from tests.client.wire import JOB, TEXT, WORDS, Answer, Asked, after, error, frames, listening, response, stream
from tests.support import eventually

MESSAGES = [{"role": "user", "content": "hi"}]
WHOLE = stream(frames())
HEAD = WHOLE.index(b"\r\n\r\n") + 4


async def read(*urls: str, give_up_s: float = 5.0, on_reconnect: Callable[[str], None] = lambda _: None) -> list[Chunk]:
    async with Client(urls, give_up_s=give_up_s, backoff_s=0.001, on_reconnect=on_reconnect) as client:
        return [chunk async for chunk in client.chat(MESSAGES, model="m")]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def cutting(cuts: list[int]) -> Answer:
    """Each response stops after so many bytes, the first one after its headers; then they come whole."""

    def answer(asked: Asked) -> bytes:
        whole = stream(after(asked.headers.get("last-event-id", "")))
        if not cuts:
            return whole
        return whole[: cuts.pop(0) + (HEAD if asked.method == "POST" else 0)]

    return answer


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, len(WHOLE)), max_size=5))
async def test_a_stream_cut_anywhere_any_number_of_times_gives_the_same_text(cuts: list[int]) -> None:
    async with listening(cutting(list(cuts))) as one, listening(one.answer) as two:
        chunks = await read(one.url, two.url)
    assert text_of(chunks) == TEXT
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert [chunk.usage for chunk in chunks if chunk.usage] == [{"completion_tokens": len(WORDS)}]
    assert [asked.method for asked in (*one.asked, *two.asked)].count("POST") == 1


async def test_it_goes_on_at_the_next_pod_after_the_last_position_and_says_so() -> None:
    cut = HEAD + WHOLE[HEAD:].index(b"two")
    places: list[str] = []
    async with listening(lambda _: WHOLE[:cut]) as one, listening(cutting([])) as two:
        chunks = await read(one.url, two.url, on_reconnect=places.append)
        assert (text_of(chunks), places) == (TEXT, [two.url])
        assert two.calls == [f"GET /v1/streams/{JOB}"]
        assert two.asked[0].headers["last-event-id"] == f"{JOB}.1-2"
        assert chunks[-1].position == f"{JOB}.1-8"


async def test_before_any_position_it_reads_from_the_start() -> None:
    async with listening(lambda _: WHOLE[: HEAD + 3]) as one, listening(cutting([])) as two:
        assert text_of(await read(one.url, two.url)) == TEXT
        assert "last-event-id" not in two.asked[0].headers


async def test_a_body_that_ends_without_done_is_not_the_end() -> None:
    async with listening(lambda _: stream(frames()[:-1])) as one, listening(cutting([])) as two:
        assert text_of(await read(one.url, two.url)) == TEXT
        assert two.asked[0].headers["last-event-id"] == f"{JOB}.1-8"


@pytest.mark.parametrize("passing", [error(503, "broker_down"), response(502, b"<html>"), error(500, "internal_error")])
async def test_a_pod_that_is_going_down_is_passed_over(passing: bytes) -> None:
    async with (
        listening(lambda _: WHOLE[: HEAD + 400]) as one,
        listening(lambda _: passing) as two,
        listening(cutting([])) as three,
    ):
        assert text_of(await read(one.url, two.url, three.url)) == TEXT
        assert (len(two.calls), len(three.calls)) == (1, 1)


async def test_it_gives_up_after_its_time() -> None:
    def answer(asked: Asked) -> bytes:
        return WHOLE[: HEAD + 400] if asked.method == "POST" else response(502, b"")

    async with listening(answer) as one:
        with pytest.raises(ConnectionLost, match="no answer for"):
            await read(one.url, give_up_s=0.1)


async def test_a_refused_connection_is_tried_elsewhere() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with listening(cutting([])) as two:
            assert text_of(await read(closed, two.url)) == TEXT


@pytest.mark.parametrize("lost", [b"", b"HTTP/1.1 200 OK\r\n", response(502, b"<html>")])
async def test_a_request_that_may_have_been_taken_is_sent_again_under_the_same_key(lost: bytes) -> None:
    async with listening(lambda _: lost) as one, listening(cutting([])) as two:
        assert text_of(await read(one.url, two.url)) == TEXT
        assert one.calls == two.calls == ["POST /v1/chat/completions"]
        [key] = {asked.headers["idempotency-key"] for asked in (*one.asked, *two.asked)}
        assert len(key) == 32


async def test_two_requests_have_two_keys() -> None:
    async with listening(cutting([])) as one:
        for _ in range(2):
            await read(one.url)
        assert len({asked.headers["idempotency-key"] for asked in one.asked}) == 2


async def test_a_stream_without_a_job_id_is_not_sent_again() -> None:
    nameless = WHOLE.replace(b"x-request-id", b"x-other-id")[: HEAD + 400]
    async with listening(lambda _: nameless) as one:
        with pytest.raises(ConnectionLost):
            await read(one.url)
        assert len(one.calls) == 1


async def test_a_pod_without_a_broker_is_passed_over() -> None:
    async with listening(lambda _: error(503, "broker_down")) as one, listening(cutting([])) as two:
        assert text_of(await read(one.url, two.url)) == TEXT


async def test_an_error_frame_is_raised_after_the_text_before_it() -> None:
    told = [*frames()[:3], b'id: x\ndata: {"error":{"message":"gone","code":"log_lost"}}\n\n', b"data: [DONE]\n\n"]
    seen = ""
    async with listening(lambda _: stream(told)) as one, Client([one.url]) as client:
        with pytest.raises(StreamFailed, match="log_lost: gone"):
            async for chunk in client.chat(MESSAGES, model="m"):
                seen += chunk.text
        assert (seen, len(one.calls)) == (" one two", 1)


async def test_a_frame_of_another_format_is_an_error() -> None:
    async with listening(lambda _: stream([b"data: {]\n\n"])) as one:
        with pytest.raises(StreamFailed, match="invalid_frame"):
            await read(one.url)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (error(400, "invalid_request"), (400, "invalid_request", "because", None)),
        (error(429, "queue_full", "retry-after: 7"), (429, "queue_full", "because", 7.0)),
        (error(503, "no_capacity"), (503, "no_capacity", "because", None)),
        (response(403, b"<html>"), (403, "http_403", "X", None)),
    ],
)
async def test_a_refusal_says_its_status_code_and_when_to_come_again(
    answer: bytes, expected: tuple[object, ...]
) -> None:
    async with listening(lambda _: answer) as one:
        with pytest.raises(RequestRefused) as raised:
            await read(one.url)
        refused = raised.value
        assert (refused.status, refused.code, refused.message, refused.retry_after_s) == expected
        assert len(one.calls) == 1


async def test_a_job_that_failed_before_its_headers_is_a_failed_stream() -> None:
    async with listening(lambda _: error(504, "timeout", f"x-request-id: {JOB}")) as one:
        with pytest.raises(StreamFailed, match="timeout"):
            await read(one.url)


async def test_a_resume_that_is_refused_is_a_failed_stream() -> None:
    async with listening(lambda _: WHOLE[: HEAD + 400]) as one, listening(lambda _: error(410, "log_lost")) as two:
        with pytest.raises(StreamFailed, match="log_lost"):
            await read(one.url, two.url)


def cancellable(asked: Asked) -> bytes:
    """A stream that begins and stops, and a job that can be deleted."""
    deleted = response(200, json.dumps({"was": "running"}).encode())
    return deleted if asked.method == "DELETE" else WHOLE[: HEAD + 400]


async def test_leaving_early_cancels_the_job() -> None:
    async with listening(cancellable) as one, Client([one.url]) as client:
        async with aclosing(client.chat(MESSAGES, model="m")) as chunks:
            assert (await anext(chunks)).text == " one"
        assert one.calls == ["POST /v1/chat/completions", f"DELETE /v1/streams/{JOB}"]


async def test_a_cancelled_task_cancels_the_job() -> None:
    """The stream stops and is asked for again, in vain, until the task is cancelled."""

    async def consume(client: Client) -> None:
        async for _ in client.chat(MESSAGES, model="m"):
            pass

    def answer(asked: Asked) -> bytes:
        return response(502, b"") if asked.method == "GET" else cancellable(asked)

    async with listening(answer) as one, Client([one.url], backoff_s=0.001) as client:
        task = asyncio.create_task(consume(client))
        await eventually(lambda: len(one.calls) > 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert one.calls[-1] == f"DELETE /v1/streams/{JOB}"


async def test_a_task_that_is_cancelled_before_it_knows_its_job_cancels_it_all_the_same() -> None:
    """The first request gets no answer; the second, under the same key, names the job."""

    async def consume(client: Client) -> None:
        async for _ in client.chat(MESSAGES, model="m"):
            pass

    async with listening(lambda _: b"") as one, Client([one.url], backoff_s=60) as client:
        task = asyncio.create_task(consume(client))
        await eventually(lambda: one.calls)
        one.answer = cancellable
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert one.calls == [*["POST /v1/chat/completions"] * 2, f"DELETE /v1/streams/{JOB}"]
        assert one.asked[0].headers["idempotency-key"] == one.asked[1].headers["idempotency-key"]


async def test_tool_calls_are_passed_on() -> None:
    calls = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]
    frame = {"choices": [{"index": 0, "delta": {"tool_calls": calls}}]}
    told = [b"id: x\ndata: %b\n\n" % json.dumps(frame).encode(), *frames()[-2:]]
    async with listening(lambda _: stream(told)) as one:
        assert (await read(one.url))[0].tool_calls == calls


async def test_a_whole_answer_is_not_cancelled() -> None:
    async with listening(cutting([])) as one:
        await read(one.url)
        assert one.calls == ["POST /v1/chat/completions"]


async def test_the_request_carries_the_fields_and_the_key() -> None:
    async with listening(cutting([])) as one, Client([one.url + "/"], "secret", give_up_s=30) as client:
        _ = [chunk async for chunk in client.chat(MESSAGES, model="m", max_tokens=3)]
        [asked] = one.asked
    body = json.loads(asked.body)
    assert (body["model"], body["max_tokens"], body["stream"], body["messages"]) == ("m", 3, True, MESSAGES)
    assert (asked.headers["authorization"], asked.headers["x-on-disconnect"]) == ("Bearer secret", "30")


@pytest.mark.parametrize("urls", [[], ["localhost:8080"], ["http://ok", "ftp://no"]])
def test_addresses_that_are_none_are_refused(urls: list[str]) -> None:
    with pytest.raises(ValueError, match="addresses"):
        Client(urls)


async def test_models_and_cancel_ask_the_next_pod_if_the_first_is_gone() -> None:
    def answer(asked: Asked) -> bytes:
        told = {"data": [{"id": "a"}, {"id": "b"}]} if asked.method == "GET" else {"was": "ended"}
        return response(200, json.dumps(told).encode())

    async with listening(lambda _: b"") as one, listening(answer) as two, Client([one.url, two.url]) as client:
        assert await client.models() == ["a", "b"]
        assert await client.cancel(JOB) == "ended"
