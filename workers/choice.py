"""One choice of a job while it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.broker.messages import FinishReason
from headrace.workers.engines.protocol import Run
from headrace.workers.text import TextFilter

REASONS: dict[str, FinishReason] = {"eos": "stop", "limit": "length", "tool_calls": "tool_calls"}
"""Why a choice is finished, by the end of its last step."""


@dataclass
class Choice:
    """One sequence of a job: its filter, its tokens so far, and what makes more of them."""

    filter: TextFilter
    token_ids: list[int] = field(default_factory=list)
    run: Run | None = None
    is_finished: bool = False
    untold: int = 0
    has_begun: bool = False
    """An earlier attempt has logged something of it."""
    reason: FinishReason | None = None

    @property
    def made(self) -> int:
        """Tokens of it so far, over all attempts."""
        return len(self.token_ids) + self.untold

    @property
    def is_open(self) -> bool:
        """The engine makes it now."""
        return self.run is not None and not self.is_finished
