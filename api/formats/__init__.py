"""The wire formats, one module each; `format.py` is what a format must do, `BY_NAME` lists them."""

from __future__ import annotations

from headrace.api.formats.format import Format
from headrace.api.formats.openai_chat import OpenAIChat
from headrace.api.formats.openai_completions import OpenAICompletions

BY_NAME: dict[str, Format] = {each.name: each for each in (OpenAIChat(), OpenAICompletions())}
