"""The cheap reader of streams: whatever the network makes of the bytes, the same events come out."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.load_wire import Exchange

BODY = b"".join(
    b"%x\r\n%b\r\n" % (len(chunk), chunk)
    for chunk in (
        b'id: j.1-1\ndata: {"a":1}\n\n',
        b": working\n",
        b"id: j.1-2.1\ndata: x\n\nid: j.1-2\ndata: y\n\nid: j.1-3\nda",
        b"ta: z\n\n",
        b"data: [DONE]\n\n",
        b"",
    )
)
STREAM = b"HTTP/1.1 200 OK\r\nX-Request-Id: j\r\nTransfer-Encoding: chunked\r\n\r\n" + BODY
EVENTS = [(b"j.1-1", b'{"a":1}'), (b"j.1-2.1", b"x"), (b"j.1-2", b"y"), (b"j.1-3", b"z"), (b"", b"[DONE]")]
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 7\r\n\r\nbecause"


class Told:
    """Keeps what an exchange tells; stops after `stop_after` events."""

    def __init__(self, stop_after: int = 99) -> None:
        self.job = ""
        self.events: list[tuple[bytes, bytes]] = []
        self.refusals: list[tuple[int, bytes]] = []
        self.closes = 0
        self._stop_after = stop_after

    def begin(self, job: str) -> None:
        self.job = job

    def event(self, position: bytes, data: bytes, now: float) -> bool:
        self.events.append((position, data))
        return len(self.events) < self._stop_after

    def refuse(self, status: int, body: bytes) -> None:
        self.refusals.append((status, body))

    def close(self) -> None:
        self.closes += 1


def tell(told: Told, data: bytes, cuts: list[int]) -> Told:
    exchange = Exchange(b"", told)
    for start, stop in pairwise(sorted([0, *cuts, len(data)])):
        exchange.data_received(data[start:stop])
    exchange.connection_lost(None)
    return told


@given(st.lists(st.integers(0, len(STREAM))))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    told = tell(Told(), STREAM, cuts)
    assert (told.job, told.events, told.closes) == ("j", EVENTS, 1)


@given(st.lists(st.integers(0, len(REFUSAL))))
def test_any_cut_gives_the_same_refusal(cuts: list[int]) -> None:
    told = tell(Told(), REFUSAL, cuts)
    assert (told.refusals, told.events, told.closes) == ([(503, b"because")], [], 1)


def test_after_a_stop_nothing_more_is_told() -> None:
    assert tell(Told(stop_after=2), STREAM, [len(STREAM) - 30]).events == EVENTS[:2]
