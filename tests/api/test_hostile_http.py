"""What a hostile client can do with HTTP itself: each has its status, disturbs nobody, and enqueues nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator

import pytest

from headrace.api import lingering
from tests.api.conftest import Deploy
from tests.api.deployment import PATHS, Answer, Deployment, raw
from tests.api.undisturbed import undisturbed
from tests.support import eventually

CHAT = PATHS["chat"]
BODY = b'{"model":"scripted","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}'
LENGTH = f"content-length: {len(BODY)}"
LIMIT = 200_000


@pytest.fixture
async def up(deploy: Deploy) -> AsyncIterator[Deployment]:
    yield await deploy({"tokens_per_s": 50.0}, api={"max_body_bytes": LIMIT, "body_timeout_s": 0.4})


def head(*lines: str, target: str = CHAT, method: str = "POST", host: str = "host: localhost") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", *([host] if host else []), *lines, "", ""]).encode("latin-1")


async def said(up: Deployment, *parts: bytes) -> Answer:
    return (await raw(up.pods[0].url, parts))[1]


async def test_a_compressed_body_is_refused_before_it_is_unpacked(up: Deployment) -> None:
    bomb = gzip.compress(b" " * 20_000_000)
    async with undisturbed(up):
        for coding in ("gzip", "x-gzip", "deflate", "br", "zstd", "gzip, gzip", "GZIP", "chunked"):
            answer = await up.ask("POST", CHAT, content=bomb, headers={"content-encoding": coding})
            assert (answer.status, answer.error["code"]) == (415, "body_encoded")
        answer = await up.ask("POST", CHAT, content=b"{}", headers={"content-encoding": "identity"})
        assert answer.error["param"] == "model"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example", "a@localhost", "["])
async def test_a_name_that_was_made_to_point_here_is_refused(up: Deployment, host: str) -> None:
    """DNS rebinding: to the browser such a page is of this origin."""
    async with undisturbed(up):
        answer = await said(up, head(LENGTH, "connection: close", host=f"host: {host}") + BODY)
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")


async def test_hosts_that_are_this_machine_are_welcome(deploy: Deploy) -> None:
    up = await deploy(api={"hosts": ["box.example"]})
    for host in (
        "localhost",
        "LOCALHOST:80",
        "a.localhost",
        "127.0.0.1:8080",
        "10.1.2.3",
        "[::1]:8080",
        "box.example:1",
    ):
        assert (await up.ask("GET", "/v1/models", headers={"host": host})).status == 200


async def test_a_page_of_another_origin_cannot_make_a_job_by_posting_blindly(up: Deployment) -> None:
    async with undisturbed(up):
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
            headers = {"origin": origin, "content-type": "text/plain"}
            answer = await up.ask("POST", CHAT, content=BODY, headers=headers)
            assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
            assert (await up.ask("GET", "/chat?prompt=hi", headers=headers)).status == 403


HEADS: dict[str, tuple[bytes, int]] = {
    "no host": (head(LENGTH, "connection: close", host="") + BODY, 400),
    "two hosts": (head(LENGTH, "host: localhost", "connection: close") + BODY, 400),
    "length and chunks": (head(LENGTH, "transfer-encoding: chunked") + BODY, 400),
    "two lengths": (head(LENGTH, "content-length: 5") + BODY, 400),
    "a negative length": (head("content-length: -1") + BODY, 400),
    "a length in hex": (head("content-length: 0x10") + BODY, 400),
    "a length beyond 64 bits": (head("content-length: " + "9" * 30) + BODY, 400),
    "a large length": (head("content-length: 18446744073709551615") + BODY, 413),
    "chunked and not": (head("transfer-encoding: chunked, identity") + BODY, 400),
    "an unknown coding": (head("transfer-encoding: gzip") + BODY, 400),
    "a space before the colon": (head("content-length : 5") + BODY, 400),
    "a folded header": (head("x-a: b\r\n c", LENGTH.replace("79", "0")), 400),
    "a NUL in a header": (head("x-a: b\0c", LENGTH) + BODY, 400),
    "a bare CR": (head("x-a: b\rc", LENGTH) + BODY, 400),
    "a chunk size beyond 64 bits": (head("transfer-encoding: chunked") + b"f" * 17 + b"\r\n", 400),
    "a chunk without its end": (head("transfer-encoding: chunked") + b"5\r\n{    xx", 400),
    "HTTP/2 without asking": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/3.0": (head(LENGTH).replace(b"HTTP/1.1", b"HTTP/3.0") + BODY, 400),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "an unknown method": (head(method="BREW"), 400),
    "a tunnel": (head(method="CONNECT", target="evil.example:443"), 400),
    "all of the server": (head("connection: close", method="OPTIONS", target="*"), 404),
    "an echo": (head("connection: close", method="TRACE"), 405),
}


@pytest.mark.parametrize("name", HEADS)
async def test_a_head_that_two_readers_could_read_otherwise_is_refused(up: Deployment, name: str) -> None:
    sent, status = HEADS[name]
    async with undisturbed(up):
        answer = await said(up, sent)
        assert answer.status in (status, 403), answer.body
        assert "error" in answer.json and b"Traceback" not in answer.body


TARGETS: dict[str, int] = {
    "//v1/models": 404,
    "/v1//models": 404,
    "/V1/MODELS": 404,
    "/v1/models;x": 404,
    "/v1/x/../models": 404,
    "/v1/%2e%2e/metrics": 404,
    "/..%2f..%2fetc/passwd": 404,
    "/v1/models%00": 404,
    "/v1/streams/%2e%2e": 400,
    "/v1/streams/..%2f..%2fmetrics": 404,
    "/v1/streams/" + "0" * 31 + "%00": 400,
    "/v1/streams/" + "0" * 31 + "*": 400,
    "/v1/streams/" + "0" * 31 + "\u0660": 400,
    "/v1/responses/resp_*": 404,
    "/v1/models/%ff%fe": 404,
    "/v1/models/" + "a" * 5000: 404,
    "/slots/0?action=save&filename=..%2f..%2fetc%2fpasswd": 404,
    "/v1/models/": 404,
    "/static/../api/app.py": 404,
    "/" * 30_000: 404,
    "/v1/models?" + "a=b&" * 5000: 200,
    "/a" * 100_000: 431,
    "/chat?prompt=" + "a" * 100_000: 431,
}


async def test_a_path_leads_where_it_says_or_nowhere(up: Deployment) -> None:
    async with undisturbed(up):
        for target, status in TARGETS.items():
            sent = head("connection: close", method="GET", target=target.encode().decode("latin-1"))
            answer = await said(up, sent)
            assert answer.status in (status, 400), target[:80]
            assert answer.status == 200 or "location" not in answer.headers
            assert len(answer.body) < 1000 and b"Traceback" not in answer.body, target[:80]
        assert (
            await said(up, head("connection: close", method="GET", target="http://evil.example/metrics"))
        ).status in (
            200,
            400,
        )


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "GET"])
async def test_a_slot_is_nothing_that_can_be_saved_or_restored(up: Deployment, method: str) -> None:
    async with undisturbed(up):
        for action in ("save", "restore", "erase"):
            answer = await up.ask(method, f"/slots/0?action={action}", json={"filename": "../../tmp/x"})
            assert answer.status == 404


async def test_a_trailer_is_no_header(up: Deployment) -> None:
    """What a proxy has looked at is what counts: a priority or a position in a trailer would be past it."""
    ended = await up.stream(max_tokens=2)
    up.recorded.told.clear()
    trailers = f"last-event-id: {ended.events[0].id}\r\nx-priority: nonsense\r\n".encode()
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    answer = await said(up, head("transfer-encoding: chunked", "connection: close"), chunks + trailers + b"\r\n")
    assert answer.status == 200
    assert len(up.recorded.told) == 1


async def test_trailers_and_extensions_of_chunks_without_end(up: Deployment) -> None:
    async with undisturbed(up):
        for start, line in (
            (b"0\r\n", b"x-%d: a\r\n" % 7 * 1000),
            (b"1;", b"a" * 10_000),
            (b"", b"1;a\r\n \r\n" * 1000),
        ):
            sent, answer = await raw(up.pods[0].url, [head("transfer-encoding: chunked") + start, *[line] * 3000])
            assert answer.status in (431, 413, 400, 408), start  # 408 where the machine is slow
            assert sent < 12_000_000


async def test_what_is_no_http_after_a_request_does_not_stand_in_its_answer(up: Deployment) -> None:
    async with undisturbed(up):
        body = BODY.replace(b'"max_tokens":1', b'"stream":true,"max_tokens":100000')
        request = head(f"content-length: {len(body)}") + body
        reader, writer = await asyncio.open_connection("127.0.0.1", int(up.pods[0].url.rpartition(":")[2]))
        writer.write(request)
        await reader.readuntil(b"data: ")
        up.recorded.told.pop()
        writer.write(b"\0\1\2\r\n\r\n" * 10)
        rest = b""
        with contextlib.suppress(ConnectionError):
            rest = await asyncio.wait_for(reader.read(), 5)
        assert b"HTTP/1.1" not in rest and b"invalid_request" not in rest
        writer.close()


async def test_an_answer_reaches_a_client_that_is_still_sending(deploy: Deploy) -> None:
    """A client that reads only once it has sent everything: with a reset in between it would never know."""
    up = await deploy(api={"max_body_bytes": LIMIT})
    body = b" " * 2_000_000
    declared, chunks = f"content-length: {len(body)}", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for sent in (
        head(declared) + body,
        head("transfer-encoding: chunked") + chunks,
        head(declared, target="/x") + body,
    ):
        answer = await asyncio.to_thread(_send_all_then_read, up.pods[0].url, sent)
        assert answer.startswith((b"HTTP/1.1 413", b"HTTP/1.1 404")) and answer.endswith(b"}")


def _send_all_then_read(url: str, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as client:
        for at in range(0, len(sent), 50_000):  # in pieces, so that there is time for a reset
            client.sendall(sent[at : at + 50_000])
        read = b""
        while part := client.recv(65_536):
            read += part
        return read


async def test_a_connection_that_lingers_ends_with_its_pod(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 60.0)
    up = await deploy(api={"max_body_bytes": LIMIT})
    pod = up.pods[0]
    with socket.create_connection(("127.0.0.1", int(pod.url.rpartition(":")[2]))) as client:
        client.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(client, head("content-length: 1000000"))
        await eventually(lambda: client_has(client, b"413"))
        assert pod.server_state.connections
        await pod.stop()
        assert not pod.server_state.connections


def client_has(client: socket.socket, text: bytes) -> bool:
    try:
        return text in client.recv(65_536, socket.MSG_PEEK)
    except BlockingIOError:
        return False


async def test_a_connection_closes_once_it_has_lingered(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 0.1)
    up = await deploy(api={"max_body_bytes": LIMIT})
    _, answer = await raw(up.pods[0].url, [head("content-length: 1000000")])
    assert answer.error["code"] == "body_too_large"
    await eventually(lambda: not up.pods[0].server_state.connections)


async def test_a_pipelined_request_with_a_body_is_answered_too(deploy: Deploy) -> None:
    up = await deploy()
    one = head(LENGTH) + BODY
    parts = [one + head(LENGTH, "connection: close") + BODY[:20], BODY[20:]]
    _, answer = await raw(up.pods[0].url, parts, pause_s=0.2)
    assert answer.body.count(b"HTTP/1.1 200") == 1  # the second; the first is the head that was read already
    assert len(up.recorded.told) == 2
    assert json.loads(answer.body.rpartition(b"\r\n\r\n")[2])["object"] == "chat.completion"
