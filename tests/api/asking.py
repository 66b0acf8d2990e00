"""Chat requests for the tests of what is read and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.api.wire.format import Parsed
from headrace.api.wire.openai_chat import OpenAIChat
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Message
from headrace.broker.settings import ApiSettings

CHAT = OpenAIChat()
LIMITS = ApiSettings()
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def parse(**fields: Any) -> Parsed:
    return CHAT.parse(body(**fields), LIMITS)


def messages_of(messages: list[dict[str, Any]]) -> list[Message]:
    prompt = parse(messages=messages).job.prompt
    assert isinstance(prompt, Chat)
    return prompt.messages


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    envelope = json.loads(CHAT.error_body(caught.value))
    assert envelope["error"].keys() == {"message", "type", "param", "code"}
    assert envelope["error"]["type"] == "invalid_request_error"
    return caught.value
