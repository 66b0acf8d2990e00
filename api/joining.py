"""Several entries as one, for readers that cannot keep up or would rather have fewer frames.

Only text is joined, of one choice and without a break: an entry that says more stays by itself. The joined entry has
the position of its last, so that a reader which comes back after it goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.broker.messages import Delta, ReadEntry


def joined(entries: Iterable[ReadEntry]) -> list[ReadEntry]:
    """The same log in fewer entries."""
    made: list[ReadEntry] = []
    run: list[Delta] = []
    for entry in entries:
        deltas = _plain_deltas(entry)
        if deltas and run and deltas[0].choice == run[0].choice:
            run += deltas
            made[-1] = ReadEntry(entry.id, entry.at_ms, [_sum(run)])
        else:
            run = deltas
            made.append(entry)
    return made


def _plain_deltas(entry: ReadEntry) -> list[Delta]:
    """The entry's events, if they are nothing but text of one choice."""
    deltas = [event for event in entry.events if isinstance(event, Delta)]
    if len(deltas) != len(entry.events) or any(each.reasoning or each.tool_calls or each.logprobs for each in deltas):
        return []
    return deltas if len({delta.choice for delta in deltas}) == 1 else []


def _sum(deltas: list[Delta]) -> Delta:
    return Delta(
        deltas[0].choice,
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
    )
