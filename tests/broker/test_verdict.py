"""Is all well? Each trouble is said, in a sentence, and nothing is said without one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headrace.broker import figures, metrics
from headrace.broker.figures import FIELD, Figures, Histogram, Published
from headrace.broker.messages import Chat, Job, ScaleDecision, View
from headrace.broker.models import ModelAutoscaling, ScriptedModel
from headrace.broker.protocol import DeadLetter, ModelStats
from headrace.broker.settings import Settings
from headrace.broker.snapshot import Readings, Snapshot, snapshot

NOW_MS = 1_800_000_000_000
SETTINGS = Settings([ScriptedModel(name="m", slots=4)])
UPPERS = figures.bounds(metrics.TIME_TO_FIRST_TOKEN)
QUIET = ModelStats({"resume": 0, "interactive": 0, "default": 0, "batch": 0}, 0, 0)


def replica(state: str = "ready", pid: int = 1, recent: Figures | None = None, **about: Any) -> dict[str, str]:
    said = {FIELD: msgspec.json.encode(Published(recent=recent or Figures())).decode()}
    return {"model": "m", "state": state, "slots": "4", "running": "0", "host": "h", "pid": str(pid), **said, **about}


def pod(recent: Figures | None = None, pid: int = 9) -> dict[str, str]:
    said = {FIELD: msgspec.json.encode(Published(recent=recent or Figures())).decode()}
    return {"host": "h", "pid": str(pid), "url": "http://pod", "streams": "0", **said}


def seen(settings: Settings = SETTINGS, **readings: Any) -> Snapshot:
    whole = Readings(0.0, {"m": QUIET}, {}, {"r": replica()}, {"p": pod()}, [])
    return snapshot(settings, replace(whole, **readings), NOW_MS)


def said(found: Snapshot) -> tuple[str, list[str]]:
    return found.verdict.state, [reason.text for reason in found.verdict.reasons]


def late(count: int, at: float) -> Figures:
    counts = [0] * len(UPPERS)
    counts[UPPERS.index(at)] = count
    return Figures(ttft=Histogram(counts))


def test_what_is_quiet_is_well() -> None:
    assert said(seen()) == ("well", [])


DEAD = DeadLetter(Job("a" * 32, "m", Chat([])), View("o", "m", "plain"), 3, NOW_MS - 1000, "worker_lost", "r")
OLD = replace(DEAD, died_ms=NOW_MS - 7_200_000)
TROUBLES: list[tuple[dict[str, Any], str, str]] = [
    ({"memory_used": 0.81}, "failing", "81% full: nothing new is admitted"),
    ({"memory_used": 0.7}, "strained", "70% full"),
    ({"pods": {}}, "failing", "there is no pod"),
    ({"replicas": {}}, "failing", "m: there is no replica"),
    ({"replicas": {}, "stats": {"m": replace(QUIET, waiting={"default": 7})}}, "failing", "and 7 requests wait"),
    ({"replicas": {"r": replica("starting")}}, "strained", "no replica is ready, 1 starting"),
    ({"stats": {"m": replace(QUIET, oldest_ms=200_000)}}, "failing", "a request has waited for 200 s"),
    ({"stats": {"m": replace(QUIET, oldest_ms=6000)}}, "strained", "a request has waited for 6 s"),
    ({"replicas": {"r": replica(recent=late(20, 1.0))}}, "strained", "100.0% of first tokens came later than 500 ms"),
    ({"replicas": {"r": replica(recent=Figures(failovers={"continued": 2}))}}, "strained", "2 jobs went on at another"),
    ({"pods": {"p": pod(Figures(requests={"ok": 80, "engine_error": 20}))}}, "failing", "20 of 100 requests failed"),
    ({"pods": {"p": pod(Figures(requests={"ok": 97, "log_lost": 3}))}}, "strained", "3 of 100 requests failed"),
    ({"pods": {"p": pod(Figures(rejections={"queue_full": 4}))}}, "strained", "4 requests were refused (queue_full 4)"),
    ({"pods": {"p": pod(Figures(resumes={"ok": 9, "lost": 1}))}}, "failing", "1 streams could not be resumed"),
    ({"dead": [DEAD]}, "strained", "1 dead letters in the last hour"),
]


@pytest.mark.parametrize(("readings", "state", "sentence"), TROUBLES, ids=[each[2] for each in TROUBLES])
def test_each_trouble_is_said(readings: dict[str, Any], state: str, sentence: str) -> None:
    found, sentences = said(seen(**readings))
    assert (found, len(sentences)) == (state, 1)
    assert sentence in sentences[0]


@pytest.mark.parametrize(
    "readings",
    [
        {"replicas": {"r": replica(recent=late(20, 0.5))}},
        {"replicas": {"r": replica(recent=late(5, 1.0))}},
        {"pods": {"p": pod(Figures(requests={"ok": 80, "context_length_exceeded": 20, "disconnected": 20}))}},
        {"pods": {"p": pod(Figures(rejections={"model_not_found": 50, "invalid_api_key": 3}))}},
        {"dead": [OLD]},
        {"stats": {"m": replace(QUIET, waiting={"default": 5}, oldest_ms=400, running=4)}},
    ],
    ids=["in time", "few", "callers' faults", "callers' mistakes", "long dead", "a short queue"],
)
def test_what_is_no_trouble_is_not_said(readings: dict[str, Any]) -> None:
    assert said(seen(**readings)) == ("well", [])


def test_the_worst_reason_is_first_and_is_the_verdict() -> None:
    state, sentences = said(seen(memory_used=0.7, replicas={}))
    assert (state, len(sentences)) == ("failing", 2)
    assert "there is no replica" in sentences[0]


def scaled(min_replicas: int) -> Settings:
    return Settings([ScriptedModel(name="m", autoscaling=ModelAutoscaling(min_replicas=min_replicas))])


def test_a_model_that_may_sleep_is_well_without_replicas_until_somebody_waits() -> None:
    assert said(seen(scaled(0), replicas={})) == ("well", [])
    waits = {"m": replace(QUIET, waiting={"default": 1})}
    assert said(seen(scaled(0), replicas={}, stats=waits))[0] == "failing"
    assert said(seen(scaled(0), replicas={"r": replica("starting")}, stats=waits))[0] == "strained"


def test_fewer_replicas_than_the_autoscaler_wants_are_said() -> None:
    wants = {"m": [ScaleDecision(NOW_MS, 1, 3, "up", "backlog")]}
    assert said(seen(scaled(1), decisions=wants)) == ("strained", ["m: 1 of 3 replicas are ready"])


def test_a_process_that_is_two_replicas_counts_once() -> None:
    both = {"r": replica(recent=late(3, 0.5)), "s": replica(recent=late(3, 0.5))}
    assert seen(replicas=both).models[0].ttft.count == 3
    apart = {"r": replica(recent=late(3, 0.5)), "s": replica(pid=2, recent=late(3, 0.5))}
    assert seen(replicas=apart).models[0].ttft.count == 6


def test_nothing_of_a_request_is_in_it() -> None:
    job = Job("b" * 32, "m", Chat([]), stop=["SECRET"])
    text = msgspec.json.encode(seen(dead=[replace(DEAD, job=job)])).decode()
    assert "b" * 32 in text
    assert "SECRET" not in text
