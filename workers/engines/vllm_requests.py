"""A job as vLLM knows it: sampling parameters, structured outputs, and the parser of its output.

Tool calls, reasoning and constraints are vLLM's own code: a job becomes the chat request that its server would get, and
the parsers say what they need of it. Only what is named here reaches the engine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMError
from vllm.parser import ParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Constraint, Grammar, Job, JsonObject, JsonSchema, Regex, Tool
from headrace.broker.models import VllmModel
from headrace.workers.engines.chat_template import ChatTemplate, openai_message, openai_tool
from headrace.workers.engines.hf_prompts import active_tools
from headrace.workers.engines.hf_vocab import HfVocab
from headrace.workers.engines.protocol import Generation
from headrace.workers.engines.vllm_parse import Parsing
from headrace.workers.engines.vllm_plugin import PREFIX_ARGUMENT

MAX_SEED = 1 << 63
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""What holds if neither the request nor the model's `generation_config.json` says anything: OpenAI's defaults."""


class Request(NamedTuple):
    """What vLLM is given, and what reads its tokens; without `parsing` they are plain text."""

    params: SamplingParams
    parsing: Parsing | None
    reasoning_ended: bool | None = None
    reasoning_arguments: dict[str, Any] | None = None


class Requests:
    """Makes requests for one loaded model; raises BadRequest for what it cannot do."""

    def __init__(self, model: VllmModel, llm: AsyncLLM, vocab: HfVocab, template: ChatTemplate | None) -> None:
        self._model = model
        self._llm = llm
        self._vocab = vocab
        self.knows_tools = model.tool_parser is not None and template is not None and template.knows_tools
        self._can_think = template is not None and template.thinking is not None
        self._defaults = llm.model_config.get_diff_sampling_param()
        self._tokenizer = llm.get_tokenizer()
        self._parser_class = ParserManager.get_parser(
            tool_parser_name=model.tool_parser,
            reasoning_parser_name=model.reasoning_parser,
            enable_auto_tools=model.tool_parser is not None,
            model_name=model.name,
            tokenizer=self._tokenizer,
        )

    def is_parsed(self, job: Job) -> bool:
        """Whether the model's output is read by parsers; only conversations have tools or reasoning."""
        if not isinstance(job.prompt, Chat) or job.prompt.is_open:
            return False
        return self._model.reasoning_parser is not None or bool(active_tools(job))

    def check(self, job: Job) -> None:
        """Raise BadRequest for what would fail later; it may take long, for a large grammar."""
        is_chat = isinstance(job.prompt, Chat)
        if job.suffix is not None:
            raise BadRequest("this engine cannot fill in text before a suffix", param="suffix")
        if job.think and not (is_chat and self._can_think):
            raise BadRequest("this model does not reason, or only in a conversation", param="think")
        if active_tools(job):
            self._check_tools(job)
        params = self.make(Generation(job, [], [], 1)).params
        try:
            config = self._llm.vllm_config
            params.verify(
                self._llm.model_config, config.speculative_config, config.structured_outputs_config, self._tokenizer
            )
        except (VLLMError, ValueError) as error:
            raise _refusal(error, job) from error

    def _check_tools(self, job: Job) -> None:
        if not isinstance(job.prompt, Chat):
            raise BadRequest("only a conversation can have tools", param="tools")
        if job.prompt.is_open:
            raise BadRequest("an answer that has begun cannot call tools", param="messages")
        if not self.knows_tools:
            raise BadRequest(
                "this model cannot call tools: its `tool_parser` or its template lacks them", param="tools"
            )

    def make(self, generation: Generation) -> Request:
        job = generation.job
        if not self.is_parsed(job):
            return Request(self._params(generation, _structure(job.constraint)), None)
        template_arguments = {} if job.think is None else {"enable_thinking": job.think}
        request = self._chat_request(job, template_arguments)
        parser = self._parser_class(
            self._tokenizer,
            request.tools,
            chat_template_kwargs=template_arguments,
            model_config=self._llm.model_config,
        )
        request = parser.adjust_request(request)
        parsing = Parsing(parser, request, generation.prompt_ids, self._vocab)
        parsing.replay(generation.generated)
        ended = request.resolve_reasoning_ended(parser, [*generation.prompt_ids, *generation.generated])
        params = self._params(generation, request.extract_structured_outputs())
        if PREFIX_ARGUMENT in (params.extra_args or {}):
            params.extra_args[PREFIX_ARGUMENT] = parsing.constrained(generation.generated, ended)
        arguments = {"chat_template_kwargs": template_arguments} if parser.reasoning_parser is not None else None
        return Request(params, parsing, ended, arguments)

    def _chat_request(self, job: Job, template_arguments: dict[str, Any]) -> ChatCompletionRequest:
        assert isinstance(job.prompt, Chat)
        fields: dict[str, Any] = {
            "model": self._model.name,
            "messages": [openai_message(message) for message in job.prompt.messages],
            "structured_outputs": _structure(job.constraint),
            "chat_template_kwargs": template_arguments,
        }
        if tools := active_tools(job):
            fields |= {"tools": [_tool(tool, job) for tool in tools], "tool_choice": _tool_choice(job)}
            if job.parallel_tool_calls is not None:
                fields["parallel_tool_calls"] = job.parallel_tool_calls
        try:
            return ChatCompletionRequest(**fields)
        except (ValidationError, VLLMError) as error:
            raise BadRequest(f"vLLM refuses these tools: {_first_line(error)}", param="tools") from error

    def _params(self, generation: Generation, structure: StructuredOutputsParams | None) -> SamplingParams:
        job, sampling = generation.job, generation.job.sampling
        values: dict[str, Any] = {}
        for name, default in SAMPLING.items():
            asked = getattr(sampling, name)
            values[name] = self._defaults.get(name, default) if asked is None else asked
        seed = sampling.seed
        try:
            return SamplingParams(
                **values,
                repetition_penalty=self._repetition_penalty(job),
                seed=None if seed is None else (seed + generation.choice) % MAX_SEED,
                max_tokens=generation.max_tokens,
                logprobs=job.logprobs,
                logit_bias=dict(sampling.logit_bias) if sampling.logit_bias else None,
                ignore_eos=job.ignore_eos,
                structured_outputs=structure,
                extra_args={PREFIX_ARGUMENT: generation.generated} if structure and generation.generated else None,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
        except (VLLMError, ValueError) as error:
            raise _refusal(error, job) from error

    def _repetition_penalty(self, job: Job) -> float:
        sampling = job.sampling
        if sampling.typical_p is not None and sampling.typical_p != 1:
            raise BadRequest("this engine has no locally typical sampling", param="typical_p")
        asked = sampling.repeat_penalty
        penalty = float(self._defaults.get("repetition_penalty", 1.0) if asked is None else asked)
        if sampling.repeat_last_n == 0:
            return 1.0
        if penalty != 1 and sampling.repeat_last_n is not None and sampling.repeat_last_n != -1:
            raise BadRequest("this engine penalizes what the whole context repeats: 0 or -1", param="repeat_last_n")
        return penalty


def _structure(constraint: Constraint | None) -> StructuredOutputsParams | None:
    match constraint:
        case None:
            return None
        case JsonObject():
            return StructuredOutputsParams(json_object=True)
        case JsonSchema(schema):
            return StructuredOutputsParams(json=schema)
        case Grammar(gbnf):
            return StructuredOutputsParams(grammar=gbnf)
        case Regex(pattern):
            return StructuredOutputsParams(regex=pattern)


def _tool(tool: Tool, job: Job) -> dict[str, Any]:
    plain = openai_tool(tool)
    if job.tool_choice == "required" or job.tool_name is not None:
        plain["function"]["strict"] = True  # the call is forced, so its arguments can be too
    return plain


def _tool_choice(job: Job) -> Any:
    if job.tool_name is not None:
        return {"type": "function", "function": {"name": job.tool_name}}
    return job.tool_choice


def _refusal(error: Exception, job: Job) -> BadRequest:
    """vLLM says which parameter it means for some of its errors; a constraint is the other thing that can be wrong."""
    param = getattr(error, "parameter", None)
    if param is None and str(error).split(" ")[0] in SAMPLING:
        param = str(error).split(" ")[0]
    if param is None and job.constraint is not None:
        param = "response_format"
    names = {
        "repetition_penalty": "repeat_penalty",
        "logprobs": "top_logprobs",
        "structured_outputs": "response_format",
    }
    return BadRequest(f"vLLM refuses this: {_first_line(error)}", param=names.get(param or "", param))


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
