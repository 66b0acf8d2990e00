"""Stored responses: found by their id, gone on from, cancelled. They are jobs that are kept after their end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request

from headrace.api import auth, submit
from headrace.api.pod import Pod
from headrace.api.wire import BY_NAME
from headrace.api.wire.format import Parsed
from headrace.api.wire.responses import RESPONSE_ID
from headrace.api.wire.responses_input import Item, messages_of
from headrace.broker import keys
from headrace.broker.errors import BadRequest, JobNotFound, PreviousNotFound
from headrace.broker.messages import Chat, Message
from headrace.broker.protocol import JobStatus

FORMAT = BY_NAME["openai.responses"]
_CANCEL_WAIT_S = 5.0
"""How long a cancel waits for the job to end; a worker takes a few hundred milliseconds."""


def job_id_of(pod: Pod, response_id: str) -> str:
    """The job that a response is; raises JobNotFound if it can be none."""
    job_id = response_id.removeprefix(RESPONSE_ID)
    if not response_id.startswith(RESPONSE_ID) or not keys.is_job_id(job_id, pod.broker.shards):
        raise JobNotFound("there is no such response, or it has expired", param="response_id")
    return job_id


async def find(pod: Pod, request: Request, response_id: str) -> JobStatus:
    """The caller's stored response; raises JobNotFound for all that is none."""
    status = await pod.broker.status(job_id_of(pod, response_id), auth.caller_of(request).owner)
    if status is None or status.view.format != FORMAT.name or not status.view.options.get("is_stored"):
        raise JobNotFound("there is no such response, or it has expired", param="response_id")
    return status


async def messages_before(pod: Pod, job_id: str, status: JobStatus) -> list[Message]:
    """What a response was asked, its instructions left out; raises JobNotFound if that is not kept any more."""
    job = await pod.broker.job(job_id)
    if job is None or not isinstance(job.prompt, Chat):
        raise JobNotFound("the response has expired", param="response_id")
    has_instructions = bool(status.view.options["response"]["instructions"])
    return job.prompt.messages[has_instructions:]


async def go_on(pod: Pod, request: Request, parsed: Parsed) -> Parsed:
    """Put the conversation that ends in `previous_response_id` before a request's own messages.

    Instructions are those of this request only. Raises PreviousNotFound, BadRequest for a response without an answer.
    """
    previous_id = parsed.options["response"]["previous_response_id"]
    if previous_id is None:
        return parsed
    try:
        status = await find(pod, request, previous_id)
        job_id = job_id_of(pod, previous_id)
        before = await messages_before(pod, job_id, status)
        answer = await _answer(pod, job_id, status)
    except JobNotFound as error:
        raise PreviousNotFound(param="previous_response_id") from error
    own = parsed.job.prompt.messages if isinstance(parsed.job.prompt, Chat) else []
    instructions = own[: bool(parsed.options["response"]["instructions"])]
    names = {call.id: call.name for message in [*before, *answer] for call in message.tool_calls}
    new = [_named(message, names) for message in own[len(instructions) :]]
    messages = [*instructions, *before, *answer, *new]
    if len(messages) > pod.settings.api.max_messages:
        raise BadRequest("The conversation has too many messages.", param="previous_response_id")
    return structs.replace(parsed, job=structs.replace(parsed.job, prompt=Chat(messages)))


def _named(message: Message, names: dict[str, str]) -> Message:
    """What a call answered says which function that was, also if the call was made in an earlier response."""
    if message.role != "tool" or message.name is not None:
        return message
    return structs.replace(message, name=names.get(message.tool_call_id or ""))


async def _answer(pod: Pod, job_id: str, status: JobStatus) -> list[Message]:
    whole = FORMAT.whole(job_id, status.view)
    await submit.fold_log(pod, job_id, whole)
    response: dict[str, Any] = msgspec.json.decode(whole.body())
    if response["status"] not in ("completed", "incomplete"):
        raise BadRequest(
            f"The previous response is {response['status']}, so there is nothing to go on from.",
            param="previous_response_id",
        )
    return messages_of(msgspec.convert(response["output"], list[Item]), pod.settings.api)


async def cancel(pod: Pod, job_id: str) -> None:
    """Cancel a response and wait until it has ended, or for a few seconds; one that has ended stays as it is."""
    await pod.cancel(job_id, "delete")
    reader = await pod.tail.attach(job_id)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_WAIT_S):
                while not (await reader.read())[-1].is_end:
                    pass
    finally:
        pod.tail.close_reader(reader, None)
