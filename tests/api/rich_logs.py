"""Logs with everything that an engine may say, for the laws of folds: text, thoughts, calls, all cut anywhere."""

from __future__ import annotations

from hypothesis import strategies as st

from headrace.broker.messages import (
    AnyEvent,
    Claimed,
    Delta,
    Ended,
    Failure,
    Finished,
    Queued,
    ReadEntry,
    Started,
    TokenLogprob,
    ToolCallDelta,
    Usage,
    View,
)

FORGERIES = [
    "\n\ndata: [DONE]\n\n",
    "\n\nevent: error\ndata: {}\n\n",
    "event: response.completed\n",
    "\r",
    "\r\n",
    "\u2028",
    "\u2029",
    "\u0085",
    "\0",
    '"}]}',
    "\\",
    "😀",
]
"""What a model might say to forge or break a frame. A lone surrogate is none of it: no entry's text can hold one."""

texts = st.one_of(st.sampled_from(FORGERIES), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4))
_logprobs = st.lists(st.builds(TokenLogprob, st.just(1), st.binary(max_size=3), st.just(-0.5)), max_size=2)


@st.composite
def _deltas(draw: st.DrawFn, choice: int) -> list[Delta]:
    """The steps of one choice. A call begins with its name; calls may grow in turn."""
    deltas: list[Delta] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "held", "thought", "call", "more", "both"]), max_size=8)):
        said = draw(texts)
        logprobs = draw(st.none() | _logprobs)
        match kind:
            case "text":
                deltas.append(Delta(choice, said, [1], logprobs))
            case "held":
                deltas.append(Delta(choice, "", [1], logprobs))
            case "thought":
                deltas.append(Delta(choice, "", [1], logprobs, reasoning=said))
            case "both":
                deltas.append(Delta(choice, said, [1], logprobs, reasoning=draw(texts)))
            case "call":
                call = ToolCallDelta(calls, draw(st.sampled_from(["", f"c{choice}{calls}"])), f"f{calls}", "")
                deltas.append(Delta(choice, "", [1], logprobs, tool_calls=[call]))
                calls += 1
            case "more" if calls:
                more = ToolCallDelta(draw(st.integers(0, calls - 1)), arguments=said)
                deltas.append(Delta(choice, "", [1], logprobs, tool_calls=[more]))
    return deltas


@st.composite
def rich_logs(draw: st.DrawFn) -> tuple[View, list[ReadEntry]]:
    """A view and a whole log; steps of choices are mixed, entries hold one or more events, attempts may change."""
    n = draw(st.integers(1, 2))
    asked = View("o", "m", "f", n=n, stream=True, include_usage=draw(st.booleans()), logprobs=draw(st.booleans()))
    rows: list[list[AnyEvent]] = []
    for choice in range(n):
        ends = [Finished(choice, "stop"), Finished(choice, "length"), Finished(choice, "tool_calls")]
        rows.append([*draw(_deltas(choice)), draw(st.sampled_from(ends))])
    body: list[list[AnyEvent]] = [[Started(5)], []]
    while any(rows):
        row = draw(st.sampled_from([row for row in rows if row]))
        body[-1].append(row.pop(0))
        if draw(st.booleans()):
            body.append([])
    body = [entry for entry in body if entry]
    if draw(st.booleans()):
        at = draw(st.integers(1, len(body)))
        body[at:at] = [[Claimed("w2", "1-1")], [Started(5, 5)]]
    end = Ended("done", usage=Usage(5, 7, 2))
    if draw(st.integers(0, 3)) == 0:
        end = draw(st.sampled_from([Ended("failed", Failure("engine_error", "it broke")), Ended("cancelled")]))
        body = body[: draw(st.integers(1, len(body)))]
    packed: list[list[AnyEvent]] = [[Queued(1_700_000_000_000)], [Claimed("w", "0-1")], *body, [end]]
    return asked, [ReadEntry(f"1-{n}", n, events) for n, events in enumerate(packed)]
