"""The fold of TGI's formats, and its errors: an event for each token.

A log says the text of a step, not of a token: text may be held back for a stop string or half a character. A token
shows its own piece where the pieces of a step are its text, else the step's last token shows all of it, so that the
tokens' texts always make the text. The event that ends the stream has a special token without text, since a step does
not know that it was the last.
"""

from __future__ import annotations

from headrace.api.wire import sse
from headrace.api.wire.ends import error_of
from headrace.broker.errors import BadRequest, EngineFailed, HeadraceError, JobEnded, TooManyDeaths
from headrace.broker.messages import Alternative, Delta, Ended, Finished, ReadEntry, Started, TokenLogprob, View

_LEAST = -3.4028234663852886e38
"""JSON has no minus infinity; this is the lowest 32-bit float."""

Shown = dict[str, object]

_FIELDS = {
    "prompt": "inputs",
    "messages": "inputs",
    "response_format": "grammar",
    "regex": "grammar",
    "logprobs": "top_n_tokens",
}
"""What workers call otherwise than TGI does."""


def envelope(error: HeadraceError) -> bytes:
    """An error as TGI says it, in place of a response or in a stream."""
    param = _FIELDS.get(error.param or "", error.param)
    text = f"{param}: {error.message}" if param and param not in error.message else error.message
    return sse.encode({"error": text, "error_type": _type(error)})


def _type(error: HeadraceError) -> str:
    if error.status == 429:
        return "overloaded"
    if isinstance(error, JobEnded):
        return "generation"
    return "validation" if isinstance(error, BadRequest) else error.code


def status_of(error: HeadraceError) -> int:
    """TGI's: 422 for a request that is not valid, 424 for a generation that failed."""
    if isinstance(error, BadRequest) and error.status == 400:
        return 422
    return 424 if isinstance(error, EngineFailed | TooManyDeaths) else error.status


class _Said:
    """What is known of the one choice so far, and how it is shown."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._top = view.options.get("top_n_tokens", 0)
        self._texts: list[str] = []
        self._prompt_tokens = 0
        self._generated = 0
        self._finish: Finished | None = None

    def note(self, event: object) -> None:
        match event:
            case Started():
                self._prompt_tokens = event.prompt_tokens
            case Delta(choice=0):
                self._texts.append(event.text)
                self._generated += len(event.token_ids)
            case Finished(choice=0):
                self._finish = event

    def tokens(self, event: Delta) -> list[tuple[Shown, list[Shown]]]:
        """The tokens of a step, each with the best ones in its place; text that came without a token has id 0."""
        ids = event.token_ids or ([0] if event.text else [])
        texts = _texts(event, len(ids))
        logprobs = event.logprobs if event.logprobs and len(event.logprobs) == len(ids) else [None] * len(ids)
        return [
            (_token(id, text, said.logprob if said else None), self._best(said))
            for id, text, said in zip(ids, texts, logprobs, strict=True)
        ]

    def _best(self, said: TokenLogprob | None) -> list[Shown]:
        tops: list[Alternative] = said.top[: self._top] if said else []
        return [_token(each.token_id, each.piece.decode(errors="replace"), each.logprob) for each in tops]

    @property
    def text(self) -> str:
        return str(self._view.options.get("prompt", "")) + "".join(self._texts)

    @property
    def details(self) -> Shown:
        return {
            "finish_reason": _reason(self._finish),
            "generated_tokens": self._generated,
            "seed": self._view.options.get("seed"),
        }

    @property
    def input_length(self) -> int:
        return self._prompt_tokens


class TGIFold:
    """A stream; see `format.Fold`. Of a job with several choices the first is shown: TGI streams no more."""

    def __init__(self, view: View) -> None:
        self._said = _Said(view)
        self._index = 0

    def feed(self, entry: ReadEntry) -> list[bytes]:
        frames: list[bytes] = []
        for event in entry.events:
            self._said.note(event)
            match event:
                case Delta(choice=0):
                    frames += [self._frame(token, best) for token, best in self._said.tokens(event)]
                case Ended(status="done"):
                    frames.append(self._last())
                case Ended():
                    frames.append(envelope(error_of(event)))
        return frames

    def _frame(self, token: Shown, best: list[Shown]) -> bytes:
        self._index += 1
        tops = {"top_tokens": best} if best else {}
        return sse.encode({"index": self._index, "token": token, **tops, "generated_text": None, "details": None})

    def _last(self) -> bytes:
        said = {
            "index": self._index + 1,
            "token": _token(0, "", None, is_special=True),
            "generated_text": self._said.text,
            "details": {**self._said.details, "input_length": self._said.input_length},
        }
        return sse.encode(said)


class TGIWhole:
    """A response in one piece; see `format.Whole`."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._said = _Said(view)
        self._tokens: list[Shown] = []
        self._best: list[list[Shown]] = []

    def feed(self, entry: ReadEntry) -> None:
        for event in entry.events:
            self._said.note(event)
            if isinstance(event, Delta) and event.choice == 0:
                for token, best in self._said.tokens(event):
                    self._tokens.append(token)
                    self._best.append(best)

    def body(self) -> bytes:
        body: Shown = {"generated_text": self._said.text}
        if self._view.options.get("details"):
            tops = {"top_tokens": self._best} if any(self._best) else {}
            body["details"] = {**self._said.details, "prefill": [], "tokens": self._tokens, **tops}
        return sse.encode([body] if self._view.options.get("is_list") else body)


def _texts(event: Delta, count: int) -> list[str]:
    pieces = [each.piece for each in event.logprobs or []]
    if len(pieces) == count and b"".join(pieces) == event.text.encode():
        try:
            return [piece.decode() for piece in pieces]
        except UnicodeDecodeError:
            pass
    return [*[""] * (count - 1), event.text] if count else []


def _token(id: int, text: str, logprob: float | None, *, is_special: bool = False) -> Shown:
    shown = None if logprob is None else max(_LEAST, logprob)
    return {"id": id, "text": text, "logprob": shown, "special": is_special}


def _reason(finish: Finished | None) -> str:
    if finish is not None and finish.reason == "length":
        return "length"
    return "stop_sequence" if finish is not None and finish.stop is not None else "eos_token"
