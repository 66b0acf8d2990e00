"""What stands in logs that other builds have written, or will write: these bytes never change."""

from __future__ import annotations

import msgspec
import pytest

from headrace.broker import messages
from headrace.broker.messages import (
    Alternative,
    AnyEvent,
    Chat,
    Claimed,
    Delta,
    Ended,
    Entry,
    Event,
    Failure,
    Finished,
    Job,
    Message,
    Queued,
    ReadEntry,
    Result,
    Sampling,
    Started,
    Timings,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
    Unknown,
    Usage,
    View,
)

GOLDEN: list[tuple[Event, str]] = [
    (Queued(1_700_000_000_000), "9200cf0000018bcfe56800"),
    (Claimed("replica-1", "0-1"), "9301a97265706c6963612d31a3302d31"),
    (Started(12, 4), "93020c04"),
    (Delta(0, " hé", [5, 70_000]), "970300a42068c3a99205ce00011170c0c0c0"),
    (
        Delta(1, "", [7], [TokenLogprob(7, b"\xe2\x82", -0.5, [Alternative(8, b"a", -1.5)])]),
        "970301a09107919407c402e282cbbfe0000000000000919308c40161cbbff8000000000000c0c0",
    ),
    (
        Delta(0, "", [9], None, "hm", [ToolCallDelta(0, "call_1", "get", "{")]),
        "970300a09109c0a2686d919400a663616c6c5f31a3676574a17b",
    ),
    (Result({"tokens": 3}), "920681a6746f6b656e7303"),
    (Finished(0, "stop", "\n\n"), "940400a473746f70a20a0a"),
    (Finished(0, "length"), "940400a66c656e677468c0"),
    (Ended("done", None, Usage(12, 3, 4), Timings(5, 6, 7)), "9505a4646f6e65c0930c030493050607"),
    (
        Ended("failed", Failure("engine_error", "no", "model")),
        "9505a66661696c656493ac656e67696e655f6572726f72a26e6fa56d6f64656cc0c0",
    ),
]

NAMES = [f"{type(event).__name__}-{place}" for place, (event, _) in enumerate(GOLDEN)]


def read(data: str) -> ReadEntry:
    return messages.decode_entry("1-2", bytes.fromhex(data))


@pytest.mark.parametrize(("event", "golden"), GOLDEN, ids=NAMES)
def test_an_event_is_written_as_its_golden_bytes(event: Event, golden: str) -> None:
    assert messages.encode(Entry(1, [event])).hex() == "920191" + golden


@pytest.mark.parametrize(("event", "golden"), GOLDEN, ids=NAMES)
def test_golden_bytes_are_read_as_their_event(event: Event, golden: str) -> None:
    assert read("920191" + golden) == ReadEntry("1-2", 1, [event])


def test_every_kind_of_event_has_golden_bytes() -> None:
    assert {type(event) for event, _ in GOLDEN} == set(Event.__args__)


def test_an_entry_is_written_as_its_golden_bytes() -> None:
    entry = Entry(250, [Started(1), Delta(0, "a", [1])])
    assert messages.encode(entry).hex() == "92ccfa9293020100970300a1619101c0c0c0"


def test_an_unknown_event_keeps_its_place_among_the_others() -> None:
    entry = read("920193" + "93020100" + "92cc63a3796f75" + "940400a473746f70c0")
    events: list[AnyEvent] = [Started(1), Unknown(99), Finished(0, "stop")]
    assert entry == ReadEntry("1-2", 1, events)
    assert not entry.is_end


def test_fields_that_a_newer_build_has_added_are_passed_over() -> None:
    started_and_more, entry_and_more = "9402010007", "93"
    assert read("920191" + started_and_more).events == [Started(1)]
    assert read(entry_and_more + "0191" + "93020100" + "a3796f75").events == [Started(1)]
    assert read(entry_and_more + "0192" + started_and_more + "91cc63" + "a3796f75").events == [Started(1), Unknown(99)]


def test_fields_that_an_older_build_did_not_have_are_their_defaults() -> None:
    assert read("920191" + "930300a0").events == [Unknown(3)]  # token_ids were always there
    assert read("920191" + "950300a1619101c0").events == [Delta(0, "a", [1])]
    assert read("920192" + "920205" + "9205a4646f6e65").events == [Started(5), Ended("done")]


def test_an_event_that_cannot_be_read_is_unknown_and_spares_its_neighbours() -> None:
    entry = read("920192" + "93020100" + "940400a4736f6f6ec0")
    assert entry.events == [Started(1), Unknown(4)]


def test_what_is_no_entry_is_an_error() -> None:
    for data in (b"", b"\x01", b"\x92\x01", messages.encode(Entry(1, []))[:-1]):
        with pytest.raises(msgspec.DecodeError):
            messages.decode_entry("1-2", data)


def test_only_a_terminal_event_at_its_end_ends_an_entry() -> None:
    assert ReadEntry("1-2", 1, [Finished(0, "stop"), Ended("done")]).is_end
    assert not ReadEntry("1-2", 1, [Finished(0, "stop")]).is_end
    assert not ReadEntry("1-2", 1, []).is_end


def test_a_job_survives_the_wire() -> None:
    job = Job("0" * 32, "m", Tokens([1, 2]), n=2, stop=["\n"], sampling=Sampling(temperature=0.0, logit_bias={5: -1.0}))
    assert messages.decode_job(messages.encode(job)) == job


def test_a_view_is_written_as_its_golden_bytes() -> None:
    view = View("alice", "m", "openai.chat", "batch", stream=True, fingerprint="ab")
    assert messages.encode(view).hex() == (
        "86a56f776e6572a5616c696365a56d6f64656ca16da6666f726d6174ab6f70656e61692e63686174a462616e64"
        "a56261746368a673747265616dc3ab66696e6765727072696e74a26162"
    )
    assert "fingerprint" not in msgspec.msgpack.decode(messages.encode(View("alice", "m", "openai.chat")))


def test_zero_is_not_the_default_of_a_sampling_field() -> None:
    job = Job("0" * 32, "m", Chat([Message("user", "hi")]), sampling=Sampling(temperature=0.0))
    assert messages.decode_job(messages.encode(job)).sampling.temperature == 0.0
    assert messages.decode_job(messages.encode(job)).sampling.top_p is None


def test_a_view_survives_the_wire_and_a_field_more() -> None:
    view = View("alice", "m", "openai.chat", "batch", stream=True)
    fields = msgspec.msgpack.decode(messages.encode(view)) | {"new": 1}
    assert messages.decode_view(msgspec.msgpack.encode(fields)) == view
