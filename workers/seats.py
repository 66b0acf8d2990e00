"""The slots of a replica's engine: a job that was claimed has a seat here, and the engine once a slot is free.

A replica holds few jobs more than slots (`Pace.ahead`): they are tokenized by the time that one comes free. Should that
take longer than it was thought, they go back, since another replica may have a slot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from headrace.broker.protocol import Claim
from headrace.workers.pace import Pace

PATIENCE_S = 1.0
"""A job that has waited here for so long goes back."""


class NoSlot(Exception):
    """No slot of this engine has come free in time."""


class Seats:
    """All of them; `on_change` is called when a job has left or has its first token: there may be room for another."""

    def __init__(self, slots: int, on_change: Callable[[], None] = lambda: None) -> None:
        self.held = 0
        """Jobs that were claimed and have not left."""
        self.pace = Pace(lambda: asyncio.get_running_loop().time())
        self.on_change = on_change
        self._free = slots
        self._line: deque[Seat] = deque()

    def seat(self, claim: Claim, asked_at: float | None = None) -> Seat:
        """Of a job that was asked for at this time of the loop; None: that was not measured."""
        self.held += 1
        if claim.job.kind == "generate":  # others are answered beside the batch
            self.pace.owes(claim.job.id, claim.fresh_tokens)
        return Seat(self, claim.job.id, asked_at)

    def take(self, seat: Seat) -> bool:
        """A slot, if one is free; else the seat stands in line."""
        if self._free > 0:
            self._free -= 1
            return True
        self._line.append(seat)
        return False

    def leave(self, seat: Seat, *, had_slot: bool) -> None:
        self.held -= 1
        self.pace.prefilled(seat.job_id)
        if had_slot:
            self.pace.freed()
            if self._line:
                self._line.popleft().call()
            else:
                self._free += 1
        elif seat in self._line:
            self._line.remove(seat)
        self.on_change()


class Seat:
    """One job's; what it says of itself is measured."""

    def __init__(self, seats: Seats, job_id: str, asked_at: float | None) -> None:
        self.job_id = job_id
        self._seats = seats
        self._asked_at = asked_at
        self._called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_slot = self._has_left = False

    async def sit(self) -> None:
        """Wait for a slot, or until the job has left; raises NoSlot."""
        if self._asked_at is not None:
            self._seats.pace.claimed(asyncio.get_running_loop().time() - self._asked_at)
        if self._has_left:
            return
        self._has_slot = self._seats.take(self)
        if not self._has_slot:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._called
            except TimeoutError:
                raise NoSlot from None

    def call(self) -> None:
        """It is the first in line, and a slot has come free."""
        self._has_slot = True
        if not self._called.done():
            self._called.set_result(None)

    def begin(self) -> None:
        self._seats.pace.prefills(self.job_id)

    def first_step(self, prefilled_tokens: int) -> None:
        self._seats.pace.prefilled(self.job_id, prefilled_tokens)
        self._seats.on_change()

    def ended(self, token_s: float) -> None:
        self._seats.pace.stepped(token_s)

    def leave(self) -> None:
        """The engine is left, or was never had; only the first call counts."""
        if self._has_left:
            return
        self._has_left = True
        if not self._called.done():
            self._called.set_result(None)
        self._seats.leave(self, had_slot=self._has_slot)
