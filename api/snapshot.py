"""What a job has come to so far, without waiting for more."""

from __future__ import annotations

from headrace.api.pod import Pod
from headrace.api.wire.format import Whole
from headrace.broker import keys
from headrace.broker.errors import JobNotFound
from headrace.broker.messages import decode_entry
from headrace.broker.tail import START

_PAGE = 1000
"""Log entries read at a time."""


async def body_so_far(pod: Pod, job_id: str, whole: Whole) -> bytes:
    """The response as it is now, of a format whose `body` may be asked early; raises JobNotFound if there is no log."""
    first = START
    while rows := await pod.broker.read(job_id, first, _PAGE):
        for entry_id, data in rows:
            whole.feed(decode_entry(entry_id, data))
        attempt, n = keys.position(rows[-1][0])
        first = f"{attempt}-{n + 1}"
    if first == START:
        raise JobNotFound
    return whole.body()
