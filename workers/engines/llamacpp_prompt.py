"""From a job to what llama.cpp is asked for: which of its ways a job goes, its prompt's tokens, and its grammar."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Batch, Chat, Job, JsonObject, JsonSchema, Message, Prompt, Text, Tokens
from headrace.workers.engines import llamacpp_tools
from headrace.workers.engines.chat_template import ChatTemplate
from headrace.workers.engines.gguf_vocab import GgufVocab
from headrace.workers.engines.llamacpp_grammar import Grammars, check_patterns


class Plan(NamedTuple):
    """How a job is generated.

    `tokens`: from tokens to tokens, which can be continued exactly unless a grammar binds them; `calls`: the same, and
    the text is words or a call in our own form; `chat`: llama.cpp renders the conversation and parses the answer.
    """

    route: Literal["tokens", "calls", "chat"]
    grammar: str | None = None

    @property
    def is_exact(self) -> bool:
        return self.route == "tokens" and self.grammar is None


class Prompts:
    """One model's prompts; may be used from any thread."""

    def __init__(self, vocab: GgufVocab, template: ChatTemplate | None) -> None:
        self.vocab = vocab
        self.template = template
        self.grammars = Grammars(vocab)

    def plan(self, job: Job) -> Plan:
        """Raises BadRequest, with `param`, for what the model cannot do."""
        if isinstance(job.prompt, Chat):
            return self._plan_chat(job, job.prompt, self._template())
        if job.tools:
            raise BadRequest("only a conversation can have tools", param="tools")
        if job.think:
            raise BadRequest("only a conversation can have reasoning", param="think")
        if job.suffix is not None:
            self._check_suffix(job)
        return Plan("tokens", self._grammar(job))

    def _plan_chat(self, job: Job, chat: Chat, template: ChatTemplate) -> Plan:
        tools = llamacpp_tools.active(job)
        if job.suffix is not None:
            raise BadRequest("a conversation has no suffix", param="suffix")
        if job.think and (template.thinking is None or chat.is_open):
            raise BadRequest("this model does not reason, or not in the middle of an answer", param="think")
        if tools and chat.is_open:
            raise BadRequest("an answer that has begun cannot call tools", param="messages")
        if tools and job.constraint is not None:
            raise BadRequest("an answer is bound to tools or to a form, not to both", param="response_format")
        if self._is_parsed(job, chat, template, bool(tools)):
            if tools and job.logprobs is not None:
                raise BadRequest("llama.cpp tells no log-probabilities of tool calls", param="logprobs")
            if job.constraint is not None and not isinstance(job.constraint, JsonObject | JsonSchema):
                raise BadRequest("this model cannot reason and keep to a grammar", param="think")
            # Refuses a schema that is wrong; the chat route makes its own grammar of it.
            self._grammar(job)
            if tools and self.grammars.has_llguidance:
                llamacpp_tools.grammar(job, self.grammars)
            for tool in tools:
                check_patterns(tool.parameters, "tools")
            if isinstance(job.constraint, JsonSchema):
                check_patterns(job.constraint.schema, "response_format")
            _check_calls(chat)
            return Plan("chat")
        if tools:
            return Plan("calls", llamacpp_tools.grammar(job, self.grammars))
        return Plan("tokens", self._grammar(job))

    @staticmethod
    def _is_parsed(job: Job, chat: Chat, template: ChatTemplate, has_tools: bool) -> bool:
        """Whether llama.cpp itself must parse the answer, because it may have reasoning or the model's own calls."""
        if chat.is_open:
            return False
        if has_tools:
            return template.knows_tools
        if template.thinking is None or (job.constraint is not None and not job.think):
            return False
        return template.thinking == "always" or job.think is not False

    def _grammar(self, job: Job) -> str | None:
        return None if job.constraint is None else self.grammars.of(job.constraint)

    def _check_suffix(self, job: Job) -> None:
        if self.vocab.fim is None:
            raise BadRequest("this model cannot fill in text before a suffix", param="suffix")
        if not isinstance(job.prompt, Text):
            raise BadRequest("a suffix follows a prompt that is text", param="suffix")

    # -- tokens -------------------------------------------------------------------------------------------------------

    def encode(self, job: Job) -> list[int]:
        """The tokens of a job's prompt; of one that llama.cpp renders itself, a close guess."""
        if job.suffix is not None and isinstance(job.prompt, Text) and self.vocab.fim is not None:
            prefix, suffix, middle = self.vocab.fim
            before = self.vocab.tokenize(job.prompt.text, parse_special=False)
            after = self.vocab.tokenize(job.suffix, parse_special=False)
            return self.vocab.with_bos([prefix, *before, suffix, *after, middle])
        if isinstance(job.prompt, Chat):
            pieces = self.render(job, job.prompt)
            ids = [i for piece in pieces for i in self.vocab.tokenize(piece, parse_special=True)]
            return self.vocab.with_bos(ids)
        return self.plain(job.prompt)

    def plain(self, prompt: Prompt, param: str = "prompt") -> list[int]:
        """Only a conversation has words of a user among words of ours; a plain text may name any token it likes."""
        match prompt:
            case Tokens(token_ids):
                self.check(token_ids, param)
                return list(token_ids)
            case Text(text):
                ids = self.vocab.tokenize(text, parse_special=True)
                return self.vocab.with_bos(ids) if text else []
            case Batch() | Chat():
                raise BadRequest("one prompt at a time", param=param)

    def check(self, token_ids: list[int], param: str) -> None:
        if any(not 0 <= i < len(self.vocab.tokens) for i in token_ids):
            raise BadRequest("there are token ids that the model does not know", param=param)

    def render(self, job: Job, chat: Chat) -> list[str]:
        """The prompt of a conversation, in pieces that are tokenized alone."""
        template = self._template()
        tools = llamacpp_tools.active(job)
        think = job.think
        if template.thinking == "switch" and (chat.is_open or (job.constraint is not None and not think)):
            think = False
        messages: list[Message] = chat.messages
        if not template.knows_tools:
            messages = llamacpp_tools.in_words(template.with_system(messages), tools)
            tools = []
        return template.render(messages, tools=tools, think=think, is_open=chat.is_open)

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise BadRequest("this model has no chat template; give it a plain prompt", param="messages")
        return self.template


def _check_calls(chat: Chat) -> None:
    """llama.cpp reads the arguments of earlier calls, and fails on what is no JSON."""
    for call in [call for message in chat.messages for call in message.tool_calls]:
        try:
            msgspec.json.decode(call.arguments)
        except msgspec.DecodeError as error:
            raise BadRequest(f"the arguments of call {call.id!r} are not JSON", param="messages") from error
