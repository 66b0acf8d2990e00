"""One sequence on vLLM: its outputs as steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from headrace.broker.errors import BadRequest, EngineFailed
from headrace.broker.messages import Alternative, TokenLogprob
from headrace.workers.engines.hf_vocab import HfVocab
from headrace.workers.engines.protocol import Generation, Step, Token, trace_headers
from headrace.workers.engines.vllm_adapters import Adapters
from headrace.workers.engines.vllm_requests import Request

logger = logging.getLogger(__name__)


class Sequence:
    """A sequence that was started; a protocol `Run`. All of it is on the loop's thread."""

    def __init__(
        self, name: str, vocab: HfVocab, emit: Callable[[Step], None], fail: Callable[[Exception], None]
    ) -> None:
        self.is_over = False
        self._name = name
        self._vocab = vocab
        self._emit = emit
        self._fail = fail
        self._has_begun = False
        self.task: asyncio.Task[None] | None = None

    def begin(self, llm: AsyncLLM, adapters: Adapters, request: Request, generation: Generation) -> None:
        self.task = asyncio.create_task(self._make(llm, adapters, request, generation), name=f"vllm {self._name}")

    def cancel(self) -> None:
        self.is_over = True
        if self.task is not None:
            self.task.cancel()

    def give(self, step: Step) -> None:
        if not self.is_over:
            self.is_over = step.end is not None
            self._emit(step)

    async def _make(self, llm: AsyncLLM, adapters: Adapters, request: Request, generation: Generation) -> None:
        try:
            await self._run(llm, await adapters.request(llm, generation.job.model), request, generation)
        except asyncio.CancelledError:
            # Also if it was cancelled while it was handed over, when vLLM's own clean-up does not know of it yet.
            await llm.abort(self._name)
            raise
        except EngineDeadError:
            logger.error("vLLM's engine core died under %s", self._name, extra={"event": "engine_core_died"})
        except EngineFailed as error:
            self._give_up(error)
        except VLLMClientError as error:
            self._give_up(BadRequest(f"vLLM refuses this: {' '.join(str(error).split())[:300]}"))
        except Exception:
            said = {"event": "sequence_failed", "request_id": generation.job.id}
            logger.exception("sequence %s failed", self._name, extra=said)
            self._give_up(EngineFailed())

    async def _run(self, llm: AsyncLLM, adapter: LoRARequest | None, request: Request, generation: Generation) -> None:
        outputs = llm.generate(
            tokens_input([*generation.prompt_ids, *generation.generated]),
            request.params,
            self._name,
            trace_headers=trace_headers(generation.job) or None,
            lora_request=adapter,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_arguments,
        )
        async for output in outputs:
            step = self._step(output, request, generation)
            self.give(step)
            if step.end is not None:
                return
        raise EngineFailed("vLLM ended a sequence without saying why")

    def _give_up(self, error: Exception) -> None:
        if not self.is_over:
            self.is_over = True
            self._fail(error)

    def _step(self, output: RequestOutput, request: Request, generation: Generation) -> Step:
        made = output.outputs[0]
        ids, end, eos = list(made.token_ids), _end(made.finish_reason), None
        if end == "eos" and ids and ids[-1] in self._vocab.eog_ids:
            eos = ids.pop()
        tokens = [self._vocab.tokens[i] for i in ids]
        logprobs = None if generation.job.logprobs is None else self._logprobs(tokens, made.logprobs, generation)
        cached = 0 if self._has_begun else output.num_cached_tokens or 0
        self._has_begun = True
        if request.parsing is None:
            return Step(tokens, logprobs, end, cached)
        parsed = request.parsing.read(tokens, eos=eos, is_last=end is not None)
        if end == "eos" and request.parsing.has_calls:
            end = "tool_calls"
        return Step(tokens, logprobs, end, cached, parsed.text, parsed.reasoning or None, parsed.tool_calls or None)

    def _logprobs(self, tokens: list[Token], told: Any, generation: Generation) -> list[TokenLogprob]:
        wanted = generation.job.logprobs or 0
        scores = []
        for token, candidates in zip(tokens, told or (), strict=False):
            best = sorted(candidates.items(), key=lambda item: item[1].rank)[:wanted]
            top = [Alternative(i, self._vocab.tokens[i].piece, each.logprob) for i, each in best]
            scores.append(TokenLogprob(token.id, token.piece, candidates[token.id].logprob, top))
        return scores


def _end(reason: str | None) -> Any:
    match reason:
        case None:
            return None
        case "stop":
            return "eos"
        case "length":
            return "limit"
    raise EngineFailed(f"vLLM ended a sequence with {reason!r}")
