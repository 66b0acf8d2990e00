"""A worker that is the test itself: it claims a job of a deployment without replicas, and writes what it is told."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.messages import Ended, Entry, Event, Job, Started, Usage, encode
from headrace.broker.protocol import Append, Settle
from tests.api.deployment import Deployment
from tests.support import eventually


class HandWorker:
    """`job` is what was claimed last."""

    def __init__(self, deployment: Deployment) -> None:
        self._broker = deployment.broker
        self._model = deployment.settings.models[0].name
        self._attempt = self._n = 0
        self.job = Job("", "", None)  # type: ignore[arg-type]  # nothing is claimed yet

    async def serve(self) -> None:
        """Offer capacity, as a replica does that is about to start."""
        await self._broker.present("cluster", "hand", self._model, {})

    async def claim(self, prompt_tokens: int = 5) -> Job:
        """Wait for a job, take it, and accept its prompt."""

        async def is_claimed() -> bool:
            for claim in await self._broker.claim(0, "hand", self._model, 1):
                self.job, self._attempt, self._n = claim.job, claim.attempt, 0
                return True
            return False

        await eventually(is_claimed)
        await self.write(Started(prompt_tokens))
        return self.job

    async def write(self, *events: Event | Sequence[Event]) -> None:
        """An entry for each; a sequence is one entry."""
        lane = self._broker.lane(0)
        for each in events:
            self._n += 1
            one = list(each) if isinstance(each, Sequence) else [each]
            append = Append(self.job.id, f"{self._attempt}-{self._n}", encode(Entry(self._n, one)))
            assert (await lane.exchange([], [append], [])).appends == ["ok"]
        await lane.close()

    async def end(self, ended: Ended | None = None) -> None:
        ended = ended or Ended("done", usage=Usage(5, 3, 1))
        lane, last = self._broker.lane(0), f"{self._attempt}-{self._n}"
        settle = Settle(self.job.id, self._attempt, last, encode(Entry(99, [ended])), ended.status)
        assert (await lane.exchange([], [], [settle])).settles == ["ok"]
        await lane.close()

    async def answer(self, *events: Event | Sequence[Event]) -> Job:
        """Take the next job, answer it with this, and settle it."""
        await self.claim()
        await self.write(*events)
        await self.end()
        return self.job
