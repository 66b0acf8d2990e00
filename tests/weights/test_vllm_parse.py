"""vLLM's parsers, fed token by token: what they have said is a function of the tokens, so any cut can be continued."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from headrace.broker.messages import Tool
from headrace.broker.models import VllmModel
from headrace.workers.engines import hf_folder
from headrace.workers.engines.chat_template import openai_tool
from headrace.workers.engines.hf_vocab import HfVocab
from headrace.workers.engines.protocol import Token
from headrace.workers.engines.vllm_parse import Parsing
from tests.weights.conftest import model_of
from tests.workers.llamacpp_runs import DATA_DIR

TOOL = Tool("get_weather", "", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>'
THOUGHTFUL = "<think>r1 😀 r2</think>The answer."


@pytest.fixture(scope="module")
def vocab() -> HfVocab:
    """The model's own tokenizer, with the words of a model that reasons."""
    model = model_of("vllm")
    assert isinstance(model, VllmModel)
    tokenizer = AutoTokenizer.from_pretrained(hf_folder.find(model, DATA_DIR, lambda what, share: None))
    tokenizer.add_tokens(["<think>", "</think>"])
    return HfVocab(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def parsing(vocab: HfVocab, reasoning: str | None) -> Parsing:
    parser_class = ParserManager.get_parser("hermes", reasoning, enable_auto_tools=True, tokenizer=vocab.tokenizer)
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=[openai_tool(TOOL)])
    parser = parser_class(vocab.tokenizer, request.tools, chat_template_kwargs={})
    return Parsing(parser, parser.adjust_request(request), vocab.tokenize("prompt"), vocab)


class Said:
    """What a parsing has said over some tokens, one step each."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: dict[int, list[str]] = {}

    def read(self, by: Parsing, vocab: HfVocab, ids: list[int], step: int, is_last: bool = True) -> Said:
        for start in range(0, len(ids), step):
            tokens = [vocab.tokens[i] for i in ids[start : start + step]]
            self._take(by, tokens)
        if is_last:
            self._take(by, [], vocab.tokenizer.eos_token_id)
        return self

    def _take(self, by: Parsing, tokens: list[Token], eos: int | None = None) -> None:
        parsed = by.read(tokens, eos=eos, is_last=eos is not None)
        self.text += parsed.text
        self.reasoning += parsed.reasoning
        for call in parsed.tool_calls:
            name, arguments = self.calls.setdefault(call.index, ["", ""])
            self.calls[call.index] = [name + call.name, arguments + call.arguments]

    @property
    def all(self) -> tuple[str, str, dict[int, list[str]]]:
        return self.text, self.reasoning, self.calls


CASES = [
    (None, "Just 😀 words, 2 < 3.", ("Just 😀 words, 2 < 3.", "", {})),
    (None, CALL, ("", "", {0: ["get_weather", '{"city": "Zürich 😀"}']})),
    (None, f"{CALL}\n{CALL}", None),
    ("deepseek_r1", THOUGHTFUL, ("The answer.", "r1 😀 r2", {})),
    ("deepseek_r1", f"<think>r1</think>{CALL}", ("", "r1", {0: ["get_weather", '{"city": "Zürich 😀"}']})),
]


@pytest.mark.parametrize(("reasoning", "written", "expected"), CASES)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_what_is_said_does_not_depend_on_steps_nor_on_where_it_was_cut(
    vocab: HfVocab, reasoning: str | None, written: str, expected: object, step: int
) -> None:
    ids = vocab.tokenize(written)
    by = parsing(vocab, reasoning)
    whole = Said().read(by, vocab, ids, step)
    if expected is not None:
        assert (whole.text.strip(), whole.reasoning, whole.calls) == expected
    else:
        assert [name for name, _ in whole.calls.values()] == ["get_weather"] * 2
        assert {json.loads(arguments)["city"] for _, arguments in whole.calls.values()} == {"Zürich 😀"}
    assert by.has_calls == bool(whole.calls)
    for cut in range(len(ids) + 1):
        said = Said().read(parsing(vocab, reasoning), vocab, ids[:cut], 1, is_last=False)
        successor = parsing(vocab, reasoning)
        successor.replay(ids[:cut])
        assert said.read(successor, vocab, ids[cut:], step).all == whole.all
        assert successor.has_calls == bool(whole.calls)


def test_a_constraint_holds_for_what_comes_after_the_reasoning(vocab: HfVocab) -> None:
    ids = vocab.tokenize(THOUGHTFUL)
    by = parsing(vocab, "deepseek_r1")
    answer = vocab.tokenize("The answer.")
    assert by.constrained(ids, reasoning_ended=True) == answer
    assert by.constrained(ids[:4], reasoning_ended=False) == []
    assert parsing(vocab, None).constrained(answer, reasoning_ended=None) == answer
