"""One job on this replica: from its claim to its settled end.

Everything here happens on the event loop's thread. A run ends in one of three ways, and only once: it settles (done,
cancelled or failed), it is released to another replica, or it is lost, when another attempt owns its log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from functools import partial

from headrace.broker import keys, messages, metrics
from headrace.broker.errors import BrokerDown, EngineFailed, HeadraceError, NotContinuable, RunTimeout
from headrace.broker.messages import (
    Delta,
    Ended,
    Event,
    Failure,
    Finished,
    FinishReason,
    Result,
    Started,
    Status,
    Timings,
    Usage,
)
from headrace.broker.models import ServiceLevels
from headrace.broker.protocol import Broker, Claim, Written
from headrace.broker.writer import LogWriter
from headrace.workers import judged
from headrace.workers.choice import REASONS, Choice
from headrace.workers.engines.protocol import Engine, Generation, Step
from headrace.workers.seats import Seat, Seats
from headrace.workers.text import TextFilter
from headrace.workers.tracing import AttemptTrace, Untraced

log = logging.getLogger(__name__)

_PAGE = 512


class JobRun:
    """See the module. `done` is set when nothing of the job is left here."""

    def __init__(
        self,
        claim: Claim,
        engine: Engine,
        writer: LogWriter,
        seat: Seat | None = None,
        trace: AttemptTrace | None = None,
        levels: ServiceLevels = ServiceLevels(),  # noqa: B008  # it is frozen
    ) -> None:
        """`seat` is its place among the engine's slots; it leaves it when it leaves the engine."""
        self.claim = claim
        self._levels = levels
        self._seat = seat or Seats(1).seat(claim)
        self._trace = trace or Untraced()
        self.job = claim.job if trace is None else trace.job
        self.track = writer.open(self.job.id, claim.attempt, claim.waited_ms, claim.readers, self._on_lost, self.fail)
        self.done = asyncio.Event()
        self.last_step_at = time.monotonic()
        self._engine = engine
        self._writer = writer
        self._choices = [Choice(TextFilter(self.job.stop)) for _ in range(self.job.n)]
        self._prompt_ids: list[int] = []
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self.is_ending = False
        self._is_in_line = False
        self.is_done = False
        """It has ended here, and whole."""
        self._began_at = time.monotonic()
        self._first_token_at: float | None = None
        self._has_content = False
        self._made = judged.Made(self.job.model)
        self._has_result = False
        self._answering: asyncio.Task[tuple[Result, int]] | None = None

    async def start(self, broker: Broker) -> None:
        """Take up what earlier attempts have logged, then set the engine to work; a failure settles the job.

        Raises BrokerDown if the log cannot be read now, NoSlot if no slot comes free: another replica may do better.
        """
        try:
            if self.claim.attempt > 1 and await self._take_up(broker):
                return
            if self.job.kind != "generate":
                await self._sit()
                await self._answer()
                return
            self._prompt_ids = await self._engine.encode(self.job)
            self._prompt_tokens = len(self._prompt_ids)
            await self._sit()
        except BrokerDown:
            raise
        except HeadraceError as error:
            self.fail(error)
            return
        if self.is_ending or self.track.is_lost:
            return
        self.track.begin(Started(self._prompt_tokens, self._cached_tokens))
        self._seat.begin()
        self._trace.started()
        for index, choice in enumerate(self._choices):
            if not choice.is_finished:
                self._generate(index, choice)
        self._end_if_finished()

    async def _sit(self) -> None:
        self._is_in_line = True
        await self._seat.sit()
        self._is_in_line = False
        self._advance()

    def cancel(self, cause: str) -> None:
        """Stop the engine and settle: as cancelled, or as failed if the job has run for too long."""
        if cause == "max_run":
            self.fail(RunTimeout())
        elif not self.is_ending:
            metrics.CANCELLATIONS.labels(cause).inc()
            self._end("cancelled", Failure("cancelled"))

    def fail(self, error: Exception) -> None:
        """Stop the engine and settle as failed; only errors of ours say their message to the caller."""
        if self.is_ending:
            return
        known = error if isinstance(error, HeadraceError) else EngineFailed()
        if known is not error:
            log.error("job %s failed", self.job.id, exc_info=error, extra=self._said("job_failed"))
        self._end("failed", Failure(known.code, known.message, known.param))

    def read_by(self, pods: Iterable[str]) -> None:
        """Who reads the job from now on."""
        self.count_tokens()
        self.track.readers = set(pods)

    def count_tokens(self) -> None:
        """Tell the metrics of the tokens that were made here since the last call: once a second, and at the end."""
        made = sum(choice.made for choice in self._choices)
        self._made.count(made, is_read=bool(self.track.readers))

    @property
    def held_tokens(self) -> int:
        """Tokens that the engine holds for this job, of prompt and answer."""
        return sum(len(self._prompt_ids) + choice.made for choice in self._choices if choice.is_open)

    def is_stuck(self, limit_s: float) -> bool:
        """The engine has made no step for this long; a job that waits for the broker is no fault of the engine, nor is
        one that waits for a slot."""
        return not self.is_ending and not self._is_in_line and time.monotonic() - self.last_step_at > limit_s

    async def release(self, broker: Broker, replica: str, *, is_death: bool = False) -> None:
        """Stop the engine and give the job to another replica; all that was made is in the log first.

        A job that is ending already is let end.
        """
        if self.is_ending:
            await self.done.wait()
            return
        self._leave_engine()
        try:
            await self.track.clear()
            if not self.track.is_lost:
                attempt, last = self.claim.attempt, self.track.last
                written = await broker.release(replica, self.job.id, attempt, last, is_death=is_death)
                log.info("job %s released: %s", self.job.id, written, extra=self._said("job_released"))
        finally:
            self._close()  # also if the broker is away: the lease gives the job back then

    def _advance(self) -> None:
        self.last_step_at = time.monotonic()

    # -- the engine's side ----------------------------------------------------------------------------------------

    async def _answer(self) -> None:
        """A job that generates nothing: its one `Result`, and the end. To do it twice does no harm."""
        self._trace.started()
        answer = self._engine.answer(self.job, self._advance)
        self._answering = asyncio.create_task(answer, name=f"answer {self.job.id}")
        await asyncio.wait([self._answering])
        if self._answering.cancelled() or self.is_ending or self.track.is_lost:
            return
        result, self._prompt_tokens = self._answering.result()
        self._first_token_at = time.monotonic()
        self.track.append([Started(self._prompt_tokens), result], is_urgent=True, usage=self._usage())
        self._end("done", None)

    async def _take_up(self, broker: Broker) -> bool:
        """Be where the last worker was; True if nothing was missing but the end, which is on its way then."""
        try:
            await self._read_log(broker)
        except Exception:
            self._note_failover("failed")
            raise
        if self.is_ending or self.track.is_lost:
            return True  # it was cancelled or taken away meanwhile
        if self._has_result or all(choice.is_finished for choice in self._choices):
            self._note_failover("finished")
            self._end("done", None)
            return True
        is_cut = any(choice.has_begun and not choice.is_finished for choice in self._choices)
        if is_cut and not self._engine.can_continue(self.job):
            self._note_failover("not_continuable")
            raise NotContinuable()
        has_begun = any(choice.has_begun for choice in self._choices)
        self._note_failover("continued" if has_begun else "restarted")
        return False

    def _note_failover(self, outcome: str) -> None:
        metrics.FAILOVERS.labels(outcome).inc()
        said = self._said("failover") | {"outcome": outcome}
        log.info("job %s taken over after %s: %s", self.job.id, self.claim.after, outcome, extra=said)

    def _said(self, event: str) -> dict[str, object]:
        return {"event": event, "request_id": self.job.id, "attempt": self.claim.attempt}

    async def _read_log(self, broker: Broker) -> None:
        """Run the logged tokens through the filters: they are then where the last worker's were."""
        first = "0-0"
        while rows := await broker.read(self.job.id, first, _PAGE):
            for entry_id, data in rows:
                entry = messages.decode_entry(entry_id, data)
                self._trace.note(entry)
                for event in entry.events:
                    if isinstance(event, Delta):
                        self._take_up_delta(event)
                    elif isinstance(event, Started):
                        self._prompt_tokens = event.prompt_tokens
                    elif isinstance(event, Finished):
                        self._choices[event.choice].is_finished = True
                        self._choices[event.choice].reason = event.reason
                    elif isinstance(event, Result):
                        self._has_result = True
            if len(rows) < _PAGE:
                return
            attempt, n = keys.position(rows[-1][0])
            first = f"{attempt}-{n + 1}"

    def _take_up_delta(self, delta: Delta) -> None:
        choice = self._choices[delta.choice]
        choice.has_begun = True
        choice.token_ids += delta.token_ids
        self._made.counted += len(delta.token_ids)
        self._has_content = self._has_content or bool(delta.text or delta.reasoning or delta.tool_calls)
        if delta.tool_calls:
            choice.filter.flush()
        elif delta.reasoning is None:
            choice.filter.push([self._engine.token(token_id) for token_id in delta.token_ids])

    def _generate(self, index: int, choice: Choice) -> None:
        """Set the engine to make what is left of a choice, if anything is."""
        limit = self.job.max_tokens
        if choice.filter.stop is not None:
            self._finish(index, "stop")
            return
        if limit is not None and limit <= len(choice.token_ids):
            if text := choice.filter.flush():
                self.track.append([Delta(index, text, [])])
            self._finish(index, "length")
            return
        left = None if limit is None else limit - len(choice.token_ids)
        generation = Generation(self.job, self._prompt_ids, list(choice.token_ids), left, index)
        choice.run = self._engine.start(generation, partial(self._on_step, index), self.fail)

    def _on_step(self, index: int, step: Step) -> None:
        """The hot path: one call per engine step and choice."""
        choice = self._choices[index]
        if self.is_ending or choice.is_finished:
            return
        self.last_step_at = now = time.monotonic()
        if self._first_token_at is None:
            self._first_token_at = now
            # a successor may also have tokens of the answer in its cache; they are not the prompt's
            self._cached_tokens = min(step.cached_tokens, self._prompt_tokens)
            self._seat.first_step(self._prompt_tokens - self._cached_tokens)
        if step.text is not None:
            self._on_parsed_step(index, step, step.text)
            return
        text = choice.filter.push(step.tokens)
        reason: FinishReason | None = None
        if choice.filter.stop is not None:
            reason = "stop"
        elif step.end is not None:
            text += choice.filter.flush()
            reason = REASONS[step.end]
        if step.tokens or text:
            token_ids = [token.id for token in step.tokens]
            choice.token_ids += token_ids
            delta = Delta(index, text, token_ids, list(step.logprobs) if step.logprobs else None)
            self.track.append([delta], is_urgent=not self._has_content)
            if text and not self._has_content:
                self._observe_first_token()
        if reason is not None:
            self._finish(index, reason)
            self._end_if_finished()

    def _on_parsed_step(self, index: int, step: Step, content: str) -> None:
        """The same for a step whose engine has parsed it: of its content, only stop strings are still of interest."""
        choice = self._choices[index]
        choice.untold += step.untold
        self._prompt_tokens = step.prompt_tokens or self._prompt_tokens
        text = choice.filter.push_text(content)
        reason = REASONS[step.end] if step.end is not None else None
        if choice.filter.stop is not None:
            reason = "stop"
        elif reason is not None or step.tool_calls:
            text += choice.filter.flush()  # no stop string goes on over a tool call
        calls = list(step.tool_calls) if step.tool_calls and choice.filter.stop is None else None
        if step.tokens or text or step.reasoning or calls:
            token_ids = [token.id for token in step.tokens]
            choice.token_ids += token_ids
            logprobs = list(step.logprobs) if step.logprobs else None
            delta = Delta(index, text, token_ids, logprobs, step.reasoning or None, calls)
            self.track.append([delta], is_urgent=not self._has_content)
            if (text or step.reasoning or calls) and not self._has_content:
                self._observe_first_token()
        if reason is not None:
            self._finish(index, reason)
            self._end_if_finished()

    def _observe_first_token(self) -> None:
        self._has_content = True
        judged.first_token(self.job, self.track.age_ms / 1000, self._levels)

    def _finish(self, index: int, reason: FinishReason) -> None:
        choice = self._choices[index]
        choice.is_finished, choice.reason = True, reason
        if choice.run is not None:
            choice.run.cancel()
        is_last = all(choice.is_finished for choice in self._choices)
        events: list[Event] = [Finished(index, reason, choice.filter.stop)]
        self.track.append(events, is_urgent=is_last, usage=self._usage() if is_last else None)

    # -- the end --------------------------------------------------------------------------------------------------

    def _end_if_finished(self) -> None:
        if all(choice.is_finished for choice in self._choices):
            self._end("done", None)

    def _end(self, status: Status, failure: Failure | None) -> None:
        self._leave_engine()
        ended = Ended(status, failure, self._usage(), self._timings())
        self.track.settle(ended).add_done_callback(partial(self._on_settled, ended))

    def _on_settled(self, ended: Ended, settled: asyncio.Future[Written]) -> None:
        status = ended.status
        if not settled.cancelled():
            log.debug("job %s %s: %s", self.job.id, status, settled.result(), extra=self._said(f"job_{status}"))
            self._observe()
            if settled.result() == "ok":
                self.is_done = status == "done"
                self._trace.end(ended, self._first_token_at, [choice.reason for choice in self._choices])
        self._close()

    def _on_lost(self) -> None:
        if not self.is_ending:
            log.warning("job %s is not ours any more", self.job.id, extra=self._said("job_lost"))
            self._leave_engine()
            self._close()

    def _leave_engine(self) -> None:
        if not self.is_ending:
            self.is_ending = True
            self._stop_engine()
            self._seat.leave()

    def _stop_engine(self) -> None:
        for choice in self._choices:
            if choice.run is not None and not choice.is_finished:
                choice.run.cancel()
        if self._answering is not None:
            self._answering.cancel()

    def _close(self) -> None:
        self.count_tokens()
        self._writer.close_track(self.track)
        for choice in self._choices:
            choice.run = None  # it calls us: both would stay until Python's next collection
        self.done.set()

    def _usage(self) -> Usage:
        completion = sum(choice.made for choice in self._choices)
        return Usage(self._prompt_tokens, completion, self._cached_tokens)

    def _timings(self) -> Timings:
        now = time.monotonic()
        first = self._first_token_at or now
        queue_ms = self.claim.waited_ms
        return Timings(queue_ms, round((first - self._began_at) * 1000), round((now - first) * 1000))

    def _observe(self) -> None:
        usage, model = self._usage(), self.job.model
        metrics.TOKENS.labels(model, "prompt").inc(usage.prompt_tokens)
        metrics.TOKENS.labels(model, "cached").inc(usage.cached_tokens)
        if self._first_token_at is not None and usage.completion_tokens > 1:
            per_token_s = (time.monotonic() - self._first_token_at) / (usage.completion_tokens - 1)
            judged.later_tokens(self.job, per_token_s, self._levels)
            self._seat.ended(per_token_s)
