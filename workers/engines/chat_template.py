"""A conversation becomes a prompt through the template that the model brings.

The template's own `<|im_end|>` must become a token, the same letters in a user's message must not: whoever could write
them would speak as the system. So each such word in a message is cut in two before the rendering, by a character that
stands nowhere in the conversation, and the prompt is given back as the pieces between the cuts, to be tokenized alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.broker.errors import BadRequest, ConfigError
from headrace.broker.messages import Message

PRIVATE_USE = range(0xE000, 0xF900)


class ChatTemplate:
    """A model's template; `special_texts` are the words that only the template may write.

    `system` is the system message of a conversation that brings none; None leaves it to the template.
    """

    def __init__(self, source: str, special_texts: Sequence[str], *, bos: str, eos: str, system: str | None) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"models: the model's chat template cannot be read: {error}") from error
        words = sorted((text for text in special_texts if len(text) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, words)) or r"(?!)")
        self._names = {"bos_token": bos, "eos_token": eos}
        self._system = system

    def render(self, messages: Sequence[Message]) -> list[str]:
        """The prompt up to where the model's answer begins, in pieces; raises BadRequest if the template refuses."""
        turns = list(messages)
        if self._system is not None and all(turn.role != "system" for turn in turns):
            turns.insert(0, Message("system", self._system))
        cut = _unused_character(turns)
        plain = [{"role": turn.role, "content": self._cut_specials(turn.content, cut)} for turn in turns]
        try:
            text = self._template.render(messages=plain, add_generation_prompt=True, **self._names)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadRequest(
                f"the model's chat template refuses this conversation: {error}", param="messages"
            ) from error
        return text.split(cut)

    def _cut_specials(self, content: str, cut: str) -> str:
        return self._special.sub(lambda found: found[0][0] + cut + found[0][1:], content)


def _environment() -> ImmutableSandboxedEnvironment:
    """As Hugging Face's templates expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _unused_character(turns: Sequence[Message]) -> str:
    used = set().union(*(turn.content for turn in turns))
    for code in PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise BadRequest("the conversation uses every private-use character there is", param="messages")
