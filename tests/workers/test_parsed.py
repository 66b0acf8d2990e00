"""Steps that their engine has parsed, and answers that are not plain text: in the log, and over a seam."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.broker.messages import Delta, Event, Finished, JsonSchema, Started, Tool, ToolCallDelta, Usage
from headrace.broker.models import ScriptedCall, ScriptedPart
from headrace.workers.engines.protocol import Step
from tests.workers.replicas import HandEngine, Stage, token_of
from tests.workers.test_continuation import Recording, cut, go_on

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = Tool("weather", parameters=SCHEMA)
SCRIPT: list[Any] = [
    ScriptedPart(reasoning="Let me "),
    ScriptedPart(reasoning="think."),
    "I will ",
    [0xC3],
    [0xA9],
    ScriptedPart(tool_call=ScriptedCall("weather", {"city": "Paris"})),
    ScriptedPart(tool_call=ScriptedCall("time", "not JSON")),
]


async def said(stage: Stage, job_id: str) -> tuple[str, str, list[tuple[str, str, str]], list[int]]:
    """Text, reasoning, calls as (id, name, arguments), and token ids of a job's log."""
    deltas: list[Delta] = await stage.events(job_id, Delta)
    calls: dict[int, tuple[str, str, str]] = {}
    for each in [each for delta in deltas for each in delta.tool_calls or []]:
        call_id, name, arguments = calls.get(each.index, ("", "", ""))
        calls[each.index] = (call_id + each.id, name + each.name, arguments + each.arguments)
    return (
        "".join(delta.text for delta in deltas),
        "".join(delta.reasoning or "" for delta in deltas),
        [calls[index] for index in sorted(calls)],
        [token_id for delta in deltas for token_id in delta.token_ids],
    )


async def test_parsed_steps_are_logged_as_they_are(stage: Stage) -> None:
    replica = await stage.replica()
    job_id = await stage.admit()
    run = await replica.run()
    call = ToolCallDelta(0, "call_1", "f")
    run.emit(Step([token_of("<think>")], text="", reasoning="Hm"))
    run.emit(Step([token_of("</think>")], text=""))
    run.emit(Step([token_of("OK")], text="OK"))
    run.emit(Step([token_of("<tool>")], text="", tool_calls=[call]))
    run.emit(Step([token_of("{}")], text="", tool_calls=[ToolCallDelta(0, arguments="{}")], end="tool_calls"))
    ended = await stage.ended(job_id)
    assert (ended.status, ended.usage) == ("done", Usage(5, 5))
    assert (await said(stage, job_id))[:3] == ("OK", "Hm", [("call_1", "f", "{}")])
    assert await stage.finishes(job_id) == [Finished(0, "tool_calls")]


async def test_b2_a_stop_string_is_found_in_parsed_text_and_not_in_reasoning(stage: Stage) -> None:
    replica = await stage.replica()
    job_id = await stage.admit(stop=["STOP"])
    run = await replica.run()
    run.emit(Step([token_of("a")], text="", reasoning="STOP"))
    run.emit(Step([token_of("b")], text="fooST"))
    assert not run.is_cancelled
    run.emit(Step([token_of("c")], text="OP", tool_calls=[ToolCallDelta(0, "1", "f")]))
    assert run.is_cancelled
    await stage.ended(job_id)
    assert (await said(stage, job_id))[:3] == ("foo", "STOP", [])
    assert await stage.finishes(job_id) == [Finished(0, "stop", "STOP")]


async def test_b2_text_that_only_looked_like_a_stop_string_is_said_before_the_call(stage: Stage) -> None:
    replica = await stage.replica()
    job_id = await stage.admit(stop=["STOP"])
    run = await replica.run()
    run.emit(Step([token_of("a")], text="fooST"))
    run.emit(Step([token_of("b")], text="", tool_calls=[ToolCallDelta(0, "1", "f")]))
    run.emit(Step([], text="OP", end="tool_calls"))
    await stage.ended(job_id)
    deltas = await stage.events(job_id, Delta)
    assert [(delta.text, bool(delta.tool_calls)) for delta in deltas] == [("foo", False), ("ST", True), ("OP", False)]
    assert await stage.finishes(job_id) == [Finished(0, "tool_calls")]


# -- an engine that cannot continue -----------------------------------------------------------------------------------


class Inexact(Recording):
    def can_continue(self, job: object) -> bool:
        return False


BEGUN: dict[str, list[Event]] = {
    "tokens": [Delta(0, "a", [1])],
    "tokens without text": [Delta(0, "", [1])],
    "a call without tokens": [Delta(0, "", [], tool_calls=[ToolCallDelta(0, "1", "f")])],
    "one of two choices": [Delta(0, "a", [1]), Finished(0, "stop"), Delta(1, "b", [2])],
}


@pytest.mark.parametrize("begun", BEGUN)
async def test_e2_what_cannot_be_continued_ends_in_an_error_of_its_own(stage: Stage, begun: str) -> None:
    job_id = await cut(stage, [Started(2)], BEGUN[begun], n=2, max_tokens=4)
    ended = await go_on(stage, job_id, engine := Inexact(), "not_continuable")
    assert ended.error is not None
    assert (ended.status, ended.error.code, engine.told) == ("failed", "not_continuable", [])
    assert ended.usage == Usage(2, sum(len(each.token_ids) for each in BEGUN[begun] if isinstance(each, Delta)))
    assert len(await stage.events(job_id, Delta)) == sum(isinstance(each, Delta) for each in BEGUN[begun])


async def test_e2_what_has_not_begun_or_is_finished_needs_no_continuation(stage: Stage) -> None:
    job_id = await cut(stage, [Started(2)], n=2, max_tokens=4)
    await go_on(stage, job_id, engine := Inexact(), "restarted")
    assert [told.generated for told in engine.told] == [[], []]
    job_id = await cut(stage, [Started(2)], [Delta(0, "a", [1]), Finished(0, "length")], n=2, max_tokens=4)
    assert (await go_on(stage, job_id, engine, "continued")).status == "done"
    assert [told.choice for told in engine.told[2:]] == [1]


async def test_e2_what_was_finished_only_lacks_its_end(stage: Stage) -> None:
    job_id = await cut(stage, [Started(2)], [Delta(0, "a", [1]), Finished(0, "stop")])
    assert (await go_on(stage, job_id, Inexact(), "finished")).status == "done"


async def test_e2_an_inexact_engine_is_asked_about_the_job(stage: Stage) -> None:
    engine = HandEngine()
    job_id = await cut(stage, [Started(2)], [Delta(0, "a", [token_of("a").id])])
    replica = await stage.replica(engine)
    (await replica.run()).say("b", end="eos")
    assert (await stage.ended(job_id)).status == "done"


async def test_e2_what_was_reasoning_is_no_text_for_the_successor(stage: Stage) -> None:
    begun = Delta(0, "", [token_of("STOP").id], reasoning="STOP")
    job_id = await cut(stage, [Started(2)], [begun], stop=["STOP"])
    replica = await stage.replica()
    (await replica.run()).say("b", end="eos")
    await stage.ended(job_id)
    assert (await said(stage, job_id))[:2] == ("b", "STOP")
    assert await stage.finishes(job_id) == [Finished(0, "stop")]


# -- killed anywhere --------------------------------------------------------------------------------------------------


JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a script with reasoning and calls": ({"script": SCRIPT}, {}),
    "a script without its reasoning": ({"script": SCRIPT}, {"think": False}),
    "a script that is cut by the limit": ({"script": SCRIPT}, {"max_tokens": 7}),
    "a limit as long as the script": ({"script": SCRIPT}, {"max_tokens": 13}),
    "a limit that is one longer": ({"script": SCRIPT}, {"max_tokens": 14}),
    "half a stop string before a call": ({"script": ["foo", "ST", SCRIPT[-1], "OP"]}, {"stop": ["STOP"]}),
    "a call that is asked for": ({}, {"tools": [WEATHER], "tool_choice": "required"}),
    "JSON": ({}, {"constraint": JsonSchema(SCHEMA), "max_tokens": 100}),
    "JSON with log-probabilities": ({}, {"constraint": JsonSchema(SCHEMA), "logprobs": 2}),
}


@pytest.mark.parametrize("job", JOBS)
async def test_e2_killed_after_any_event_the_successor_says_the_rest(stage: Stage, job: str) -> None:
    model, fields = JOBS[job]
    job_id = await stage.admit("hello", **fields)
    first = await stage.replica(Recording(**model))
    ended = await stage.ended(job_id)
    whole, finishes = await said(stage, job_id), await stage.finishes(job_id)
    probabilities = [each for delta in await stage.events(job_id, Delta) for each in delta.logprobs or []]
    entries = [[event] for event in await stage.events(job_id, Started, Delta, Finished)]
    assert len(entries) >= 8
    await first.drain()
    for until in range(len(entries) + 1):
        again = await cut(stage, *entries[:until], **fields)
        successor = await stage.replica(Recording(**model))
        assert (await stage.ended(again)).usage == ended.usage
        assert await said(stage, again) == whole
        assert await stage.finishes(again) == finishes
        assert [each for d in await stage.events(again, Delta) for each in d.logprobs or []] == probabilities
        await successor.drain()


async def test_what_the_scripted_engine_says_of_tools_reasoning_and_json(stage: Stage) -> None:
    await stage.replica(Recording(script=SCRIPT))
    job_id = await stage.admit()
    await stage.ended(job_id)
    text, reasoning, calls, _ = await said(stage, job_id)
    assert (text, reasoning) == ("I will é", "Let me think.")
    assert [call[1:] for call in calls] == [("weather", '{"city":"Paris"}'), ("time", "not JSON")]
    assert all(call[0].startswith("call_") for call in calls)
    assert calls[0][0] != calls[1][0]
    assert await stage.finishes(job_id) == [Finished(0, "tool_calls")]
    deltas = [each for delta in await stage.events(job_id, Delta) for each in delta.tool_calls or []]
    assert sum(each.index == 0 for each in deltas) == 5
    assert [each.name for each in deltas if each.index == 0] == ["weather", "", "", "", ""]


async def test_the_scripted_engine_calls_the_tool_that_is_named_with_arguments_of_its_schema(stage: Stage) -> None:
    await stage.replica(Recording())
    tools = [Tool("a"), WEATHER]
    named = await stage.admit(tools=tools, tool_choice="required", tool_name="weather")
    await stage.ended(named)
    text, _, [(_, name, arguments)], _ = await said(stage, named)
    assert (text, name, set(json.loads(arguments))) == ("", "weather", {"city", "days"})
    automatic = await stage.admit(tools=tools, max_tokens=3)
    await stage.ended(automatic)
    assert (await said(stage, automatic))[2] == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER], "tool_name": "other"}, "tool_choice"),
        ({"constraint": JsonSchema({"type": "string", "pattern": "x"})}, "response_format"),
        ({"think": True}, "think"),
    ],
)
async def test_what_the_scripted_engine_cannot_say_it_refuses(stage: Stage, fields: Any, param: str) -> None:
    await stage.replica(Recording())
    ended = await stage.ended(await stage.admit(**fields))
    assert ended.error is not None
    assert (ended.error.code, ended.error.param) == ("invalid_request", param)
