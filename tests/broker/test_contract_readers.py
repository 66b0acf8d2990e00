"""The promise of `protocol.Broker`, on both brokers: readers, what they are told, and what it means if they leave."""

from __future__ import annotations

from headrace.broker import messages
from headrace.broker.protocol import Append, Broker, Hint
from tests.broker.steps import (
    STEP,
    Ears,
    MakeBroker,
    admit,
    append,
    claim,
    end_of,
    exchange,
    finish,
    last_id,
    log_of,
    reap,
    settle,
    state_of,
    tick,
    unknown_id,
)
from tests.support import eventually

# -- watch and unwatch -----------------------------------------------------------------------------------------------


async def test_watch_says_which_jobs_are_there(broker: Broker) -> None:
    waiting, ended = await admit(broker), await finish(broker)
    assert await broker.watch("p", [waiting, unknown_id(), ended]) == [True, False, True]


async def test_readers_that_came_after_the_first_are_counted(broker: Broker) -> None:
    job_id = await admit(broker, pod="p1")

    async def resumes() -> int:
        status = await broker.status(job_id)
        assert status is not None
        return status.resumes

    await broker.watch("p1", [job_id])
    assert await resumes() == 0
    await broker.watch("p1", [job_id], is_return=True)
    await broker.watch("p2", [job_id], is_return=True)
    await broker.watch("p2", [job_id])
    assert await resumes() == 2


async def test_a_watch_goes_to_every_shard(make_broker: MakeBroker) -> None:
    broker = await make_broker(shards=3)
    absent = "0002" + unknown_id()[4:]
    assert await broker.watch("p", [absent, await admit(broker)]) == [False, True]


async def test_claim_answers_the_pods_that_read(broker: Broker) -> None:
    job_id = await admit(broker, pod="p1")
    await broker.watch("p2", [job_id])
    assert sorted((await claim(broker)).readers) == ["p1", "p2"]


async def test_a_new_reader_of_a_running_job_is_news(broker: Broker) -> None:
    job_id = await admit(broker, pod="p1")
    await claim(broker)
    await broker.watch("p2", [job_id])
    [news] = (await tick(broker)).news
    assert (news.job_id, news.attempt, sorted(news.readers)) == (job_id, 1, ["p1", "p2"])


async def test_a_renewed_reading_lease_is_no_news(broker: Broker) -> None:
    job_id = await admit(broker, pod="p1")
    await claim(broker)
    await broker.watch("p1", [job_id])
    assert (await tick(broker)).news == []


async def test_a_pod_that_does_not_renew_is_no_reader_for_workers(make_broker: MakeBroker) -> None:
    broker = await make_broker(reader_lease_s=0.1)
    job_id = await admit(broker, pod="p")

    async def has_lapsed() -> bool:
        claimed = await claim(broker)
        await broker.release("r", job_id, claimed.attempt, f"{claimed.attempt}-0")
        return claimed.readers == []

    await eventually(has_lapsed)


async def test_a_reader_that_leaves_is_news(broker: Broker) -> None:
    job_id = await admit(broker, pod="p1")
    await broker.watch("p2", [job_id])
    await claim(broker)
    await broker.unwatch("p1", {job_id: None})
    assert [news.readers for news in (await tick(broker)).news] == [["p2"]]


async def test_the_last_reader_that_leaves_starts_the_grace_time(broker: Broker) -> None:
    job_id = await admit(broker, pod="p", grace_ms=200)
    await claim(broker)
    await broker.unwatch("p", {job_id: None})
    assert [news.cancel for news in (await tick(broker)).news] == [""]

    async def is_marked() -> bool:
        return (await reap(broker)).unread == 1

    await eventually(is_marked)
    assert [news.cancel for news in (await tick(broker)).news] == ["unread"]


async def test_a_reader_that_comes_back_in_the_grace_time_keeps_the_job(make_broker: MakeBroker) -> None:
    broker = await make_broker(queue_timeout_s=0.2)
    lease = await admit(broker, pod="p", grace_ms=50)
    await claim(broker)
    await broker.unwatch("p", {lease: None})
    await broker.watch("p", [lease])
    await admit(broker)  # its timeout says that the grace time is long over

    async def has_passed() -> bool:
        reaped = await reap(broker)
        assert reaped.unread == 0
        return reaped.timeouts == 1

    await eventually(has_passed)
    assert await state_of(broker, lease) == "running"


async def test_grace_0_ends_a_waiting_job_at_once(broker: Broker) -> None:
    job_id = await admit(broker, pod="p", grace_ms=0)
    await broker.unwatch("p", {job_id: None})
    assert await end_of(broker, job_id) == ("1-0", "cancelled", "cancelled")


async def test_grace_0_marks_a_running_job_at_once(broker: Broker) -> None:
    job_id = await admit(broker, pod="p", grace_ms=0)
    await claim(broker)
    await broker.unwatch("p", {job_id: None})
    assert [news.cancel for news in (await tick(broker)).news] == ["disconnect"]


async def test_a_leaving_reader_may_ask_for_another_grace_time(broker: Broker) -> None:
    job_id = await admit(broker, pod="p", grace_ms=60_000)
    await broker.unwatch("p", {job_id: 0})
    assert await state_of(broker, job_id) == "cancelled"


async def test_a_job_of_grace_minus_1_runs_without_readers(make_broker: MakeBroker) -> None:
    broker = await make_broker(reader_lease_s=0.05, queue_timeout_s=0.3)
    job_id = await admit(broker, pod="p", grace_ms=-1)
    await claim(broker)
    await broker.watch("p2", [job_id])
    await broker.unwatch("p", {job_id: None})
    await _outlast(broker)
    assert [news.cancel for news in (await tick(broker)).news] == [""]


async def test_a_leaving_reader_that_asks_for_minus_1_lets_the_job_run_on(make_broker: MakeBroker) -> None:
    broker = await make_broker(reader_lease_s=0.05, queue_timeout_s=0.3)
    job_id = await admit(broker, pod="p", grace_ms=50)
    await claim(broker)
    await broker.unwatch("p", {job_id: -1})
    await _outlast(broker)
    assert [news.cancel for news in (await tick(broker)).news] == [""]


async def _outlast(broker: Broker) -> None:
    """Reap until a job that is admitted now has timed out, and see that no other was cancelled for want of readers."""
    await admit(broker)

    async def is_over() -> bool:
        reaped = await reap(broker)
        assert reaped.unread == 0
        return reaped.timeouts == 1

    await eventually(is_over)


async def test_one_of_two_readers_that_leaves_changes_nothing(broker: Broker) -> None:
    job_id = await admit(broker, pod="p1", grace_ms=0)
    await broker.watch("p2", [job_id])
    await broker.unwatch("p1", {job_id: None})
    assert await state_of(broker, job_id) == "waiting"
    await broker.unwatch("p2", {job_id: None})
    assert await state_of(broker, job_id) == "cancelled"


async def test_unwatch_may_be_repeated_and_tolerates_what_is_not_there(broker: Broker) -> None:
    job_id = await admit(broker, pod="p1", grace_ms=0)
    await broker.watch("p2", [job_id])
    await broker.unwatch("p1", {job_id: None, unknown_id(): 0})
    await broker.unwatch("p1", {job_id: None})
    assert await state_of(broker, job_id) == "waiting"


async def test_a_pod_that_never_read_has_no_say_in_the_grace_time(broker: Broker) -> None:
    job_id = await admit(broker, grace_ms=60_000)
    await broker.unwatch("stranger", {job_id: 0})
    assert await state_of(broker, job_id) == "waiting"


async def test_a_pod_that_does_not_renew_reads_no_more(make_broker: MakeBroker) -> None:
    broker = await make_broker(reader_lease_s=0.1)
    job_id = await admit(broker, pod="p", grace_ms=50)

    async def is_cancelled() -> bool:
        return (await reap(broker)).unread == 1

    await eventually(is_cancelled)
    assert await end_of(broker, job_id) == ("1-0", "cancelled", "cancelled")


async def test_a_job_that_nobody_ever_read_is_cancelled_after_its_grace_time(broker: Broker) -> None:
    job_id = await admit(broker, grace_ms=0)
    assert (await reap(broker)).unread == 1
    assert await state_of(broker, job_id) == "cancelled"


async def test_an_ended_log_goes_when_its_time_is_over(make_broker: MakeBroker) -> None:
    broker = await make_broker(log_ttl_s=0.1)
    job_id = await finish(broker)

    async def is_gone() -> bool:
        return await broker.status(job_id) is None and await last_id(broker, job_id) is None

    await eventually(is_gone)
    assert await broker.watch("p", [job_id]) == [False]


async def test_an_ended_log_lives_on_while_it_is_watched(make_broker: MakeBroker) -> None:
    broker = await make_broker(log_ttl_s=0.4)
    watched, other = await finish(broker), await finish(broker)

    async def is_other_gone() -> bool:
        assert await broker.watch("p", [watched]) == [True]
        return await last_id(broker, other) is None

    await eventually(is_other_gone)
    assert (await log_of(broker, watched))[-1].is_end


# -- hints -----------------------------------------------------------------------------------------------------------


async def test_readers_hear_what_the_verbs_append_as_the_log_has_it(broker: Broker, ears: Ears) -> None:
    job_id = await admit(broker, pod="p")
    pod = await ears.pod(broker, "p")
    await claim(broker)
    await settle(broker, job_id, 1, "1-0")
    await eventually(lambda: len(pod.heard) == 2)
    log = await broker.read(job_id, "1-0", 9)
    assert pod.heard == [Append(job_id, entry_id, data) for entry_id, data in log]


async def test_readers_hear_of_a_cancel(broker: Broker, ears: Ears) -> None:
    job_id = await admit(broker, pod="p")
    pod = await ears.pod(broker, "p")
    await broker.cancel(job_id, "test")
    await eventually(lambda: pod.ids == ["1-0"])


async def test_only_pods_that_read_the_job_hear_of_it(broker: Broker, ears: Ears) -> None:
    job_id = await admit(broker, pod="p1")
    other, pod = await ears.pod(broker, "p2"), await ears.pod(broker, "p1")
    await broker.cancel(job_id, "test")
    await eventually(lambda: pod.ids == ["1-0"])
    assert other.heard == []


async def test_hints_of_a_lane_and_of_the_verbs_arrive_in_order(broker: Broker, ears: Ears) -> None:
    job_id = await admit(broker, pod="p")
    pod = await ears.pod(broker, "p")
    await claim(broker)
    lane = broker.lane(0)
    shown: list[Append] = []
    for n in range(1, 20):
        entry = Append(job_id, f"1-{n}", STEP)
        assert (await lane.exchange([Hint("p", shown)] if shown else [], [entry], [])).appends == ["ok"]
        shown = [entry]
    assert (await lane.exchange([Hint("p", shown)], [], [])).deaf == []
    await lane.close()
    await settle(broker, job_id, 1, "1-19")
    await eventually(lambda: len(pod.heard) == 21)
    assert pod.ids == [f"1-{n}" for n in range(21)]
    assert messages.decode_entry("1-20", pod.heard[-1].data).is_end


async def test_a_hint_carries_entries_of_many_jobs(broker: Broker, ears: Ears) -> None:
    pod = await ears.pod(broker, "p")
    entries = [Append(unknown_id(), "1-1", STEP), Append(unknown_id(), "7-2", b"")]
    await exchange(broker, hints=[Hint("p", entries)])
    await eventually(lambda: pod.heard == entries)


async def test_a_lane_names_the_pods_that_have_no_connection(broker: Broker, ears: Ears) -> None:
    await ears.pod(broker, "here")
    hints = [Hint(pod, [Append(unknown_id(), "1-1", STEP)]) for pod in ("away", "here", "gone")]
    assert (await exchange(broker, hints=hints)).deaf == ["away", "gone"]


async def test_a_pod_that_has_closed_its_subscription_is_deaf(broker: Broker, ears: Ears) -> None:
    await ears.pod(broker, "p")
    await ears.listeners[0].close()

    async def is_deaf() -> bool:
        return (await exchange(broker, hints=[Hint("p", [])])).deaf == ["p"]

    await eventually(is_deaf)


# -- reading the log -------------------------------------------------------------------------------------------------


async def test_read_answers_from_the_given_entry_on(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await append(broker, job_id, "1-1")
    assert [entry_id for entry_id, _ in await broker.read(job_id, "1-0", 9)] == ["1-0", "1-1"]
    assert [entry_id for entry_id, _ in await broker.read(job_id, "0-1", 1)] == ["0-1"]
    assert await broker.read(job_id, "1-1", 9) == [("1-1", STEP)]
    assert await broker.read(unknown_id(), "0-1", 9) == []


async def test_read_after_answers_for_many_logs_what_is_new(broker: Broker) -> None:
    busy, silent = await admit(broker), await admit(broker)
    await claim(broker)
    await append(broker, busy, "1-1")
    positions = {busy: "1-0", silent: "0-1", unknown_id(): "0-1"}
    assert await broker.read_after(0, positions, 9) == {busy: [("1-1", STEP)]}
    [entries] = (await broker.read_after(0, {busy: "0-0"}, 2)).values()
    assert [entry_id for entry_id, _ in entries] == ["0-1", "1-0"]


async def test_read_after_of_nothing_is_nothing(broker: Broker) -> None:
    assert await broker.read_after(0, {}, 9) == {}


async def test_positions_compare_as_numbers(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    for n in range(1, 12):
        await append(broker, job_id, f"1-{n}")
    assert await last_id(broker, job_id) == "1-11"
    assert [entry_id for entry_id, _ in await broker.read(job_id, "1-9", 9)] == ["1-9", "1-10", "1-11"]


async def test_last_id_of_a_job_that_is_not_there_is_none(broker: Broker) -> None:
    assert await last_id(broker, unknown_id()) is None
