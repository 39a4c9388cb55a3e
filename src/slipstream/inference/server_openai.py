"""Chat and text completions: OpenAI's shapes over the same engine calls.

Owns: ``/v1/chat/completions`` and ``/v1/completions`` with ``n``, streaming, log-probs and vLLM's extensions
(``return_token_ids``, ``stop_reason``, ``weight_versions``).
Refuses: parsing answers (tool calls, reasoning), and any option it would have to ignore.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from slipstream.errors import RequestError
from slipstream.inference import wire
from slipstream.inference.types import GenerateRequest, GenerateResult

if TYPE_CHECKING:
    from slipstream.inference.server import Service


def _tail(service: Service, body: wire.OpenAIFields, result: GenerateResult, last: bool) -> dict[str, Any]:
    """What every choice ends with."""
    return {
        "finish_reason": result.finish_reason if last else None,
        "stop_reason": result.stop_reason if last else None,
        "token_ids": list(result.token_ids) if body.return_token_ids else None,
        "weight_versions": wire.versions_json(result) if last else None,
    }


def _completion_logprobs(service: Service, result: GenerateResult, offset: int) -> dict[str, Any]:
    texts = service.token_texts(result)
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": list(result.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }


async def _chat(service: Service, body: wire.ChatBody, http: Request) -> Response:
    from slipstream.inference.server import sse

    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise RequestError("give max_tokens or max_completion_tokens, not both")
    prompt = service.render(body.messages, body.tools, body.add_generation_prompt, body.chat_template_kwargs)
    context = await service.context(http, body.request_id, "chatcmpl", prompt)
    requests = body.expand(
        prompt,
        context,
        max_tokens=body.max_tokens or body.max_completion_tokens,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )

    def choice(index: int, result: GenerateResult, last: bool, part: str) -> dict[str, Any]:
        logprobs = wire.text_logprobs_json(result, service.token_texts(result)) if body.logprobs else None
        message: dict[str, Any] = {"content": result.text}
        if part == "message":
            message = {"role": "assistant", **message}
        return {"index": index, part: message, "logprobs": logprobs, **_tail(service, body, result, last)}

    head = {"id": context.request_id, "created": int(time.time()), "model": context.model}
    if body.stream:

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            base = {**head, "object": "chat.completion.chunk"}
            opening = [
                {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                for i in range(len(requests))
            ]
            first: dict[str, Any] = {**base, "choices": opening}
            if body.return_token_ids:
                first["prompt_token_ids"] = prompt
            yield first
            totals = _Totals(len(prompt))
            async for index, result, last in service.stream(context.request_id, requests):
                totals.add(result)
                yield {**base, "choices": [choice(index, result, last, "delta")]}
            if body.stream_options and body.stream_options.include_usage:
                yield {**base, "choices": [], "usage": totals.usage()}

        return sse(chunks())
    results = await service.run(http, context.request_id, requests)
    return JSONResponse(
        {
            **head,
            "object": "chat.completion",
            "choices": [choice(i, r, True, "message") for i, r in enumerate(results)],
            "usage": wire.usage_json(len(prompt), results),
            "prompt_token_ids": prompt if body.return_token_ids else None,
        }
    )


class _Totals:
    """Usage of a stream: partial results are summed."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens, self.made, self.cached = prompt_tokens, 0, 0

    def add(self, result: GenerateResult) -> None:
        self.made += len(result.token_ids)
        self.cached = max(self.cached, result.cached_tokens)

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.made,
            "total_tokens": self.prompt_tokens + self.made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


async def _expand_prompts(
    service: Service, body: wire.CompletionBody, http: Request
) -> tuple[wire.RequestContext, list[list[int]], list[GenerateRequest]]:
    """All requests of a completion call, prompt by prompt; choice ``p * n + i`` is sample ``i`` of prompt ``p``."""
    prompts = [p if isinstance(p, list) else service.encode(p, body.add_special_tokens) for p in body.prompts()]
    if any(not ids for ids in prompts):
        raise RequestError("prompt: an empty prompt cannot be continued")
    longest = max(prompts, key=len)
    context = await service.context(http, body.request_id, "cmpl", longest)
    many = len(prompts) > 1
    requests: list[GenerateRequest] = []
    for p, ids in enumerate(prompts):
        name = f"{context.request_id}-p{p}" if many else context.request_id
        own = wire.RequestContext(name, context.model, context.room, context.session_id, context.group_id)
        requests += body.expand(
            ids,
            own,
            # OpenAI's default for text completions.
            max_tokens=body.max_tokens if body.max_tokens is not None else min(16, context.room),
            cache_salt=body.cache_salt,
            priority=body.priority,
        )
    return context, prompts, requests


async def _complete(service: Service, body: wire.CompletionBody, http: Request) -> Response:
    from slipstream.inference.server import sse

    context, prompts, requests = await _expand_prompts(service, body, http)
    written: dict[int, int] = {}

    def choice(index: int, result: GenerateResult, last: bool) -> dict[str, Any]:
        offset = written.get(index, 0)
        written[index] = offset + len(result.text)
        return {
            "index": index,
            "text": result.text,
            "logprobs": _completion_logprobs(service, result, offset) if body.logprobs is not None else None,
            **_tail(service, body, result, last),
            "prompt_token_ids": prompts[index // body.n] if body.return_token_ids else None,
        }

    n_prompt = sum(map(len, prompts))
    head = {"id": context.request_id, "object": "text_completion", "created": int(time.time()), "model": context.model}
    if body.stream:

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            totals = _Totals(n_prompt)
            async for index, result, last in service.stream(context.request_id, requests):
                totals.add(result)
                yield {**head, "choices": [choice(index, result, last)]}
            if body.stream_options and body.stream_options.include_usage:
                yield {**head, "choices": [], "usage": totals.usage()}

        return sse(chunks())
    results = await service.run(http, context.request_id, requests)
    choices: Sequence[dict[str, Any]] = [choice(i, r, True) for i, r in enumerate(results)]
    return JSONResponse({**head, "choices": choices, "usage": wire.usage_json(n_prompt, results)})


def openai_routes(service: Service) -> APIRouter:
    """The two completion routes over a service."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: wire.ChatBody, http: Request) -> Response:
        wire.refuse_model(body.model, service.served_names())
        return await _chat(service, body, http)

    @router.post("/v1/completions", response_model=None)
    async def completions(body: wire.CompletionBody, http: Request) -> Response:
        wire.refuse_model(body.model, service.served_names())
        return await _complete(service, body, http)

    return router
