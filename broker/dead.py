"""What is done with dead letters in more than one step."""

from __future__ import annotations

import hashlib

import msgspec

from headrace.broker.errors import JobNotFound
from headrace.broker.protocol import Admission, Broker


async def requeue(broker: Broker, job_id: str) -> str:
    """Admit what a dead letter asks for as a new job, since a log has exactly one end; answers the new id.

    Nobody needs to read it: it runs to its end. Safe to repeat: the new id is a function of the old one. Raises
    JobNotFound if there is no such dead letter, QueueFull or NoCapacity, and then the dead letter stays.
    """
    new_id = job_id[:4] + hashlib.sha256(f"requeue {job_id}".encode()).hexdigest()[:28]
    letter = await broker.dead_letter(job_id)
    if letter is not None:
        await broker.admit(Admission(msgspec.structs.replace(letter.job, id=new_id), letter.view))
        await broker.expire(job_id)
    elif await broker.status(new_id) is None:
        raise JobNotFound("there is no such dead letter")
    return new_id
