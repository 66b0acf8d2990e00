"""Any life that a job can lead: both brokers agree on every step of it, and it ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headrace.broker import keys
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.memory import MemoryBroker
from headrace.broker.messages import BANDS, Band, Status
from headrace.broker.protocol import Broker
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from tests.broker.steps import append, log_of, serve, settle
from tests.support import an_admission

QUEUE = QueueSettings(max_deaths=2, lease_s=60.0, reader_lease_s=60.0)
LIVE = ("waiting", "running", "unknown")


class Life(RuleBasedStateMachine):
    """A few jobs, one replica, and a writer that knows what was claimed, or believes what is no longer so."""

    jobs: Bundle[str] = Bundle("jobs")
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._brokers: list[Broker] = [RedisBroker(self.url, RedisSettings(), QUEUE), MemoryBroker(QUEUE)]
        self._held: dict[str, tuple[int, int]] = {}
        """Of jobs that were claimed and not given back: the last attempt, and how many entries were written in it."""
        self._attempts: dict[str, int] = {}
        self._deaths: dict[str, int] = {}
        self._ended: dict[str, list[str]] = {}
        for broker in self._brokers:
            self._runner.run(broker.open())
            self._runner.run(serve(broker))

    def teardown(self) -> None:
        for broker in self._brokers:
            self._runner.run(broker.close())
        self._runner.close()

    def both(self, verb: Callable[[Broker], Awaitable[Any]]) -> Any:
        async def run(broker: Broker) -> Any:
            return await verb(broker)

        first, second = (self._runner.run(run(broker)) for broker in self._brokers)
        assert first == second
        return first

    @precondition(lambda self: len(self._deaths) < 3)
    @rule(target=jobs, band=st.sampled_from(BANDS[1:]), owner=st.sampled_from(["a", "b"]))
    def admit(self, band: Band, owner: str) -> str:
        job_id = keys.new_job_id(1)
        assert self.both(lambda broker: _is_new(broker, job_id, band, owner)) is True
        assert self.both(lambda broker: _is_new(broker, job_id, band, owner)) is False
        self._deaths[job_id] = 0
        return job_id

    @precondition(lambda self: self._deaths.keys() - self._ended.keys() - self._held.keys())
    @rule(count=st.integers(1, 3))
    def claim(self, count: int) -> None:
        for job, attempt, _ in self.both(lambda broker: _claimed(broker, count)):
            assert attempt > self._attempts.get(job, 0), "an attempt that was there"
            assert job not in self._ended, "a job that has ended"
            self._attempts[job] = attempt
            self._held[job] = attempt, 0

    @precondition(lambda self: self._held)
    @rule(pick=st.integers(0, 2), is_stale=st.booleans())
    def write(self, pick: int, is_stale: bool) -> None:
        job, (attempt, n) = list(self._held.items())[pick % len(self._held)]
        attempt -= is_stale
        written = self.both(lambda broker: append(broker, job, f"{attempt}-{n + 1}"))
        if written == "ok":
            assert not is_stale and job not in self._ended
            self._held[job] = attempt, n + 1

    @precondition(lambda self: self._held)
    @rule(pick=st.integers(0, 2), status=st.sampled_from(["done", "failed", "cancelled"]), is_stale=st.booleans())
    def settle(self, pick: int, status: Status, is_stale: bool) -> None:
        job, (attempt, n) = list(self._held.items())[pick % len(self._held)]
        last = f"{attempt}-{n - is_stale}" if n or not is_stale else f"{attempt - 1}-7"
        if self.both(lambda broker: settle(broker, job, attempt, last, status)) == "ok":
            assert not is_stale and job not in self._ended
            del self._held[job]

    @precondition(lambda self: self._held)
    @rule(pick=st.integers(0, 2), is_death=st.sampled_from([True, True, False]))
    def release(self, pick: int, is_death: bool) -> None:
        job, (attempt, n) = list(self._held.items())[pick % len(self._held)]
        if self.both(lambda broker: broker.release("r", job, attempt, f"{attempt}-{n}", is_death=is_death)) == "ok":
            self._deaths[job] += is_death
            del self._held[job]

    @rule(job=jobs, is_wanted=st.sampled_from([False, False, False, True]))
    def cancel(self, job: str, is_wanted: bool) -> None:
        if not is_wanted:  # else few jobs would live to see anything
            return
        was = self.both(lambda broker: broker.cancel(job, "delete"))
        assert was in ("waiting", "running", "ended")
        assert (was == "ended") == (job in self._ended)

    @invariant()
    def every_job_is_the_same_to_both_and_ends_once(self) -> None:
        for job in self._deaths:
            state, entries = self.both(lambda broker, job=job: _look(broker, job))  # type: ignore[misc]
            ids = [entry_id for entry_id, _ in entries]
            places = [keys.position(entry_id) for entry_id in ids]
            assert places == sorted(set(places)) and ids[0] == "0-1"
            ends = [index for index, (_, kinds) in enumerate(entries) if "Ended" in kinds]
            assert ends == ([] if state in LIVE else [len(entries) - 1])
            assert self._ended.setdefault(job, ids) == ids if ends else job not in self._ended
            assert state in ("failed", "cancelled") or self._deaths[job] < QUEUE.max_deaths


async def _is_new(broker: Broker, job_id: str, band: Band, owner: str) -> bool:
    return (await broker.admit(an_admission(job_id, band=band, owner=owner))).is_new


async def _claimed(broker: Broker, count: int) -> list[tuple[str, int, str]]:
    return [(claim.job.id, claim.attempt, claim.after) for claim in await broker.claim(0, "r", "m", count)]


async def _log(broker: Broker, job_id: str) -> list[tuple[str, list[str]]]:
    return [(entry.id, [type(event).__name__ for event in entry.events]) for entry in await log_of(broker, job_id)]


async def _look(broker: Broker, job_id: str) -> tuple[str, list[tuple[str, list[str]]]]:
    status = await broker.status(job_id)
    return status.state if status else "unknown", await _log(broker, job_id)


def test_any_life_of_jobs_is_the_same_on_both_brokers(
    redis_server: EmbeddedServer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Empty(Life):
        def __init__(self) -> None:
            redis_client.flushall()
            super().__init__()

    monkeypatch.setattr(Life, "url", redis_server.url)
    # what is found is shown as it is: to make it short would take minutes
    few = settings(max_examples=30, stateful_step_count=30, deadline=None, database=None, phases=[Phase.generate])
    run_state_machine_as_test(Empty, settings=few)
