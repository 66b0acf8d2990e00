"""Entries joined for readers that cannot keep up, or ask for fewer frames: the same text, and the same places in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.joining import joined
from headrace.api.wire import BY_NAME
from headrace.api.wire.format import can_join
from headrace.broker.messages import Delta, ReadEntry, ToolCallDelta, View
from tests.api.conftest import Deploy
from tests.api.reading import content
from tests.api.test_fold_properties import _logs
from tests.workers.replicas import oracle_text

formats = pytest.mark.parametrize("name", [name for name, form in BY_NAME.items() if can_join(form)])


def deltas(entries: list[ReadEntry], choice: int) -> tuple[str, list[int]]:
    found = [
        event for entry in entries for event in entry.events if isinstance(event, Delta) and event.choice == choice
    ]
    return "".join(each.text for each in found), [token_id for each in found for token_id in each.token_ids]


def entry(n: int, *events: Delta) -> ReadEntry:
    return ReadEntry(f"1-{n}", n, list(events))


@formats
@given(case=_logs(), cut=st.integers(0, 40))
def test_what_follows_joined_entries_is_what_would_have_followed(
    name: str, case: tuple[View, list[ReadEntry]], cut: int
) -> None:
    view, log = case
    plain, fewer = BY_NAME[name].fold("ab", view), BY_NAME[name].fold("ab", view)
    for each in log[:cut]:
        plain.feed(each)
    for each in joined(log[:cut]):
        assert len(fewer.feed(each)) <= 1 or each in log
    assert [fewer.feed(each) for each in log[cut:]] == [plain.feed(each) for each in log[cut:]]


@given(case=_logs())
def test_joined_entries_say_the_same_and_end_where_the_last_did(case: tuple[View, list[ReadEntry]]) -> None:
    view, log = case
    fewer = joined(log)
    assert [deltas(fewer, index) for index in range(view.n)] == [deltas(log, index) for index in range(view.n)]
    assert fewer[-1] == log[-1] and {each.id for each in fewer} <= {each.id for each in log}


def test_a_run_of_text_is_one_entry_and_what_says_more_stays_alone() -> None:
    call = Delta(0, "", [5], tool_calls=[ToolCallDelta(0, "c", "f")])
    log = [entry(1, Delta(0, "a", [1])), entry(2, Delta(0, "b", [2]), Delta(0, "c", [3])), entry(3, Delta(1, "d", [4]))]
    log += [entry(4, call), entry(5, Delta(0, "", [6], reasoning="r"))]
    assert joined(log) == [ReadEntry("1-2", 2, [Delta(0, "abc", [1, 2, 3])]), *log[2:]]


async def test_a_client_may_ask_for_fewer_frames_and_resume_after_any_of_them(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 100.0}, pods=2)
    answer = await up.stream(max_tokens=60, headers={"x-coalesce-ms": "150"})
    said = [event for event in answer.events if event.id and '"content":" ' in event.data]
    assert content(answer.events) == oracle_text("hi", 60)
    assert len(said) < 20
    job = answer.headers["x-request-id"]
    for event in said:
        seen = "".join(each.json["choices"][0]["delta"]["content"] for each in said[: said.index(event) + 1])
        rest = await up.resume(job, event.id, pod=1)
        assert seen + content(rest.events) == oracle_text("hi", 60)


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "10001", "99999999"])
async def test_h3_a_coalescing_time_that_is_none_is_refused(deploy: Deploy, value: str) -> None:
    up = await deploy()
    refused = await up.stream(headers={"x-coalesce-ms": value})
    assert (refused.status, refused.error["param"]) == (400, "X-Coalesce-Ms")
    assert up.recorded.told == []
