"""A conversation inside of another format's body: read as OpenAI's chat completions read it."""

from __future__ import annotations

import msgspec

from headrace.api.wire.openai_chat import OpenAIChat
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat
from headrace.broker.settings import ApiSettings

_CHAT = OpenAIChat()


def chat(messages: msgspec.Raw, limits: ApiSettings) -> Chat:
    """Read the JSON of `messages`; raises BadRequest with `param` as in `messages[0].role`."""
    prompt = _CHAT.parse(b'{"model":"-","messages":%b}' % bytes(messages), limits).job.prompt
    if not isinstance(prompt, Chat):
        raise BadRequest("messages must be a conversation.", param="messages")
    return prompt
