"""The wire form: vLLM's JSON bodies to and from the contract's types.

Owns: request bodies (strict: an unknown key is an error that names it), responses, and reading a response back.
Refuses: HTTP itself, engines, silently dropping a key.  A field that vLLM knows and this server cannot honour
is accepted only at the value that means "off".

The token endpoint is ``POST /inference/v1/generate`` of vLLM >= 0.32.  Its JSON has no room for two things that
requests carry, so they travel as headers: ``X-Session-ID`` (the routers' session identity) and ``X-Group-ID``.

>>> body = GenerateBody.model_validate({"token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "seed": 7}})
>>> [r.seed for r in body.requests(RequestContext("r", "policy", 64))]
[7]
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.errors import ContractError, InferenceError, RequestError
from slipstream.inference.types import FinishReason, GenerateRequest, GenerateResult, TopLogprobs
from slipstream.trajectory import SamplingSpec, VersionRun

SESSION_HEADER = "X-Session-ID"
GROUP_HEADER = "X-Group-ID"
_SALT_LENGTH = 128
_MOST_CHOICES = 1024
_MOST_CANDIDATES = 1024
_NO_MASS = -9999.0
"""vLLM's log-prob of a candidate that cannot be drawn."""
_PLACEHOLDER = "token_id:"

TokenId = Annotated[int, Field(ge=0, strict=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
OnlyTrue = Literal[True]
OnlyFalse = Literal[False]


class UnknownModelError(RequestError):
    """The request names a model that is not served (HTTP 404)."""


class Wire(BaseModel):
    """Base of every body: no unknown keys."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


@dataclass(frozen=True)
class RequestContext:
    """What the transport knows and the body does not.

    ``room`` is how many tokens fit after the prompt; it caps ``max_tokens`` when the caller gave none.
    ``kept_sets`` and ``routed_experts``: the server was started to return them (flags of the server, as in vLLM).
    """

    request_id: str
    model: str
    room: int
    session_id: str | None = None
    group_id: str | None = None
    kept_sets: bool = False
    routed_experts: bool = False


class SamplingFields(Wire):
    """The sampling fields that all three data-plane endpoints share, under vLLM's names and defaults."""

    n: int = Field(1, ge=1, le=_MOST_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    skip_special_tokens: OnlyTrue = True
    spaces_between_special_tokens: OnlyTrue = True
    include_stop_str_in_output: OnlyFalse = False
    bad_words: list[str] | None = Field(None, max_length=0)
    logit_bias: None = None
    structured_outputs: None = None
    truncate_prompt_tokens: None = None

    def spec(self) -> SamplingSpec:
        """The sampling spec; raises ``ContractError`` when a rule of it is broken."""
        return SamplingSpec(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or -1,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )

    def expand(
        self,
        token_ids: Sequence[int],
        context: RequestContext,
        *,
        max_tokens: int | None,
        prompt_logprobs: bool = False,
        top_logprobs: int = 0,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> list[GenerateRequest]:
        """``n`` requests: sample ``i`` has seed ``seed + i``, and all share one group."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        many = self.n > 1
        return [
            GenerateRequest(
                request_id=f"{context.request_id}-{i}" if many else context.request_id,
                token_ids=tuple(token_ids),
                sampling=self.spec(),
                max_tokens=max_tokens if max_tokens is not None else max(context.room, 1),
                stop=stops,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=self.ignore_eos,
                min_tokens=self.min_tokens,
                seed=None if self.seed is None else self.seed + i,
                model=context.model,
                session_id=context.session_id,
                group_id=context.group_id or (context.request_id if many else None),
                cache_salt=cache_salt,
                priority=priority,
                prompt_logprobs=prompt_logprobs,
                kept_sets=context.kept_sets,
                routed_experts=context.routed_experts,
                top_logprobs=top_logprobs,
            )
            for i in range(self.n)
        ]


class SamplingParams(SamplingFields):
    """``sampling_params`` of the token endpoint.

    ``logprobs`` of 0 or 1 asks for the sampled token's log-probability, more for candidates too: the sampled token
    first, then the most likely others, so many in all.  ``prompt_logprobs`` has no candidates.
    """

    logprobs: int | None = Field(None, ge=0, le=_MOST_CANDIDATES)
    prompt_logprobs: int | None = Field(None, ge=0, le=1)
    detokenize: bool = True


class StreamOptions(Wire):
    """``stream_options``."""

    include_usage: bool = False
    continuous_usage_stats: OnlyFalse = False


class GenerateBody(Wire):
    """``POST /inference/v1/generate``: tokens in, tokens out."""

    request_id: str | None = Field(None, min_length=1)
    model: str | None = None
    token_ids: TokenIds
    sampling_params: SamplingParams
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    priority: int = 0
    return_token_ids: bool = False
    output_mode: Literal["tokens", "text"] = "tokens"
    features: None = None
    content_parts: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None

    def requests(self, context: RequestContext) -> list[GenerateRequest]:
        """The ``n`` requests."""
        params = self.sampling_params
        return params.expand(
            self.token_ids,
            context,
            max_tokens=params.max_tokens,
            prompt_logprobs=params.prompt_logprobs is not None,
            top_logprobs=params.logprobs if params.logprobs and params.logprobs > 1 else 0,
            cache_salt=self.cache_salt,
            priority=self.priority,
        )


class OpenAIFields(SamplingFields):
    """What chat and text completions share."""

    request_id: str | None = Field(None, min_length=1)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    priority: int = 0
    return_token_ids: bool = False
    response_format: None = None
    user: None = None


class ChatBody(OpenAIFields):
    """``POST /v1/chat/completions``.  ``tools`` go to the chat template; the answer is not parsed for calls."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Literal[0] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    add_generation_prompt: bool = True
    continue_final_message: OnlyFalse = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    chat_template: None = None


class CompletionBody(OpenAIFields):
    """``POST /v1/completions``: one prompt or several, as text or token ids."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    logprobs: int | None = Field(None, ge=0, le=1)
    add_special_tokens: bool = True
    echo: OnlyFalse = False
    best_of: Literal[1] | None = None
    suffix: None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, always as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[t for t in self.prompt if isinstance(t, int)]]
        return [p for p in self.prompt if not isinstance(p, int)]


class TokenizeBody(Wire):
    """``POST /tokenize``: a text, or messages rendered with the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: OnlyFalse = False


class DetokenizeBody(Wire):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


def describe(error: ValidationError) -> str:
    """One line naming each offending key and its rule."""
    return describe_errors(error.errors(include_url=False))


def describe_errors(errors: Sequence[Mapping[str, Any]]) -> str:
    """As ``describe``, of pydantic's error list."""
    parts = []
    for item in errors:
        where = ".".join(str(part) for part in item["loc"] if part != "body") or "body"
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown field {where!r}")
        else:
            parts.append(f"{where}: {item['msg']}")
    return "; ".join(dict.fromkeys(parts))


def new_id(prefix: str) -> str:
    """A fresh request id."""
    return f"{prefix}-{uuid.uuid4().hex}"


# ---- results to JSON


def array_text(array: npt.NDArray[Any]) -> str:
    """An array as base64 of numpy's file format, as vLLM sends ``routed_experts``."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def usage_json(prompt_tokens: int, results: Sequence[GenerateResult]) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    made = sum(len(r.token_ids) for r in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": max((r.cached_tokens for r in results), default=0)},
    }


def versions_json(result: GenerateResult) -> list[dict[str, Any]]:
    """``weight_versions``: contiguous runs over the output tokens."""
    return [{"version": run.version, "start": run.start, "end": run.end} for run in result.versions]


def token_logprobs_json(result: GenerateResult) -> dict[str, Any]:
    """``logprobs`` with token ids (token endpoint, ``output_mode=tokens``)."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token, "logprob": logprob, "rank": None}

    rows = zip(result.token_ids, result.logprobs, _candidates(result), strict=True)
    return {"content": [{**entry(t, lp), "top_logprobs": [entry(*c) for c in top]} for t, lp, top in rows]}


def placeholder(token: int) -> str:
    """How a token is named where only a string fits (vLLM's ``--return-tokens-as-token-ids``)."""
    return f"{_PLACEHOLDER}{token}"


def text_logprobs_json(result: GenerateResult, token_text: Sequence[str]) -> dict[str, Any]:
    """``logprobs`` in the chat form: token strings and their UTF-8 bytes.  Candidates are named by placeholders."""

    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    rows = zip(token_text, result.logprobs, _candidates(result), strict=True)
    return {
        "content": [
            {**entry(text, lp), "top_logprobs": [entry(placeholder(t), v) for t, v in top]} for text, lp, top in rows
        ]
    }


def _candidates(result: GenerateResult) -> list[list[tuple[int, float]]]:
    """What vLLM lists for each token: the sampled one first, then the others, as many as were asked for in all."""
    if result.top_logprobs is None:
        return [[] for _ in result.token_ids]
    out = []
    for token, logprob, (ids, values) in zip(result.token_ids, result.logprobs, result.top_logprobs, strict=True):
        others = [(t, v) for t, v in zip(ids.tolist(), values.tolist(), strict=True) if t != token]
        out.append([(token, logprob), *others][: len(ids)])
    return out


def generate_choice(
    result: GenerateResult, index: int, *, logprobs: bool, token_text: Sequence[str] | None, last: bool = True
) -> dict[str, Any]:
    """One choice of the token endpoint; ``token_text`` selects ``output_mode=text``."""
    choice: dict[str, Any] = {
        "index": index,
        "finish_reason": result.finish_reason if last else None,
        "stop_reason": result.stop_reason if last else None,
        "token_ids": list(result.token_ids),
        "logprobs": None,
        "routed_experts": None if result.routed_experts is None else array_text(result.routed_experts),
        "sampling_mask": None if result.kept_sets is None else [kept.tolist() for kept in result.kept_sets],
        "weight_versions": versions_json(result) if last else None,
    }
    if token_text is not None:
        choice["text"] = result.text
    if logprobs:
        choice["logprobs"] = (
            token_logprobs_json(result) if token_text is None else text_logprobs_json(result, token_text)
        )
    return choice


def prompt_logprobs_json(token_ids: Sequence[int], result: GenerateResult) -> list[dict[str, Any] | None] | None:
    """The form of vLLM: per prompt token ``{id: {logprob, rank, decoded_token}}``, null for the first."""
    if result.prompt_logprobs is None:
        return None
    rows = zip(token_ids, result.prompt_logprobs, strict=True)
    return [
        None if lp is None else {str(token): {"logprob": lp, "rank": None, "decoded_token": None}} for token, lp in rows
    ]


# ---- the client's side


def request_json(request: GenerateRequest, *, model: str | None = None, stream: bool = False) -> dict[str, Any]:
    """The body of the token endpoint for one request; the inverse of ``GenerateBody.requests``.

    ``output_mode`` is ``text``: the server decodes, since it knows where a stop string cut the text.
    """
    spec = request.sampling
    params: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "min_p": spec.min_p,
        "repetition_penalty": spec.repetition_penalty,
        "presence_penalty": spec.presence_penalty,
        "frequency_penalty": spec.frequency_penalty,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        # One more than the head: a sampled token outside of it takes a place.
        "logprobs": request.top_logprobs + 1 if request.top_logprobs else 0,
        "n": 1,
    }
    if request.seed is not None:
        params["seed"] = request.seed
    if request.prompt_logprobs:
        params["prompt_logprobs"] = 0
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "model": model or request.model,
        "token_ids": list(request.token_ids),
        "sampling_params": params,
        "output_mode": "text",
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if request.cache_salt is not None:
        body["cache_salt"] = _wire_salt(request.cache_salt)
    if request.priority:
        body["priority"] = request.priority
    return body


def _wire_salt(salt: str) -> str:
    """A salt in the characters and length that vLLM takes (versions have slashes); distinct ones stay distinct."""
    quoted = urllib.parse.quote(salt, safe="")
    return quoted if len(quoted) <= _SALT_LENGTH else hashlib.sha256(salt.encode()).hexdigest()


def request_headers(request: GenerateRequest) -> dict[str, str]:
    """Session and group travel beside the body."""
    headers = {}
    if request.session_id is not None:
        headers[SESSION_HEADER] = request.session_id
    if request.group_id is not None:
        headers[GROUP_HEADER] = request.group_id
    return headers


def _logprob(value: Any, where: str) -> float:
    number = float(value)
    # float32 log-softmax may exceed 0 by a rounding error; anything more is not a log-probability.
    if not math.isfinite(number) or number > 1e-3:
        raise InferenceError(f"{where}: the server reports log-prob {value!r}; it must be finite and <= 0")
    return min(number, 0.0)


def _read_prompt_logprobs(request: GenerateRequest, rows: Any, where: str) -> tuple[float | None, ...] | None:
    if not request.prompt_logprobs:
        return None
    if rows is None or len(rows) != len(request.token_ids):
        raise InferenceError(f"{where}: prompt_logprobs were asked for and do not cover the prompt")
    pairs = zip(request.token_ids, rows, strict=True)
    return tuple(None if row is None else _logprob(row[str(token)]["logprob"], where) for token, row in pairs)


def _read_kept_sets(
    request: GenerateRequest, ids: Sequence[int], rows: Any, where: str
) -> tuple[npt.NDArray[np.int32], ...] | None:
    spec = request.sampling
    cut = not spec.greedy and (spec.top_p < 1 or spec.top_k != -1 or spec.min_p > 0)
    if not request.kept_sets or not cut or not ids:
        return None
    if rows is None or len(rows) != len(ids):
        raise InferenceError(
            f"{where}: kept sets were asked for and do not cover the output; start the server with "
            "--return-sampling-mask (vLLM also wants --logprobs-mode processed_logprobs, and top_k > 0 in each request)"
        )
    kept = tuple(np.asarray(row, dtype=np.int32) for row in rows)
    for token, row in zip(ids, kept, strict=True):
        if token not in row:
            raise InferenceError(f"{where}: the kept set of token {token} does not contain it")
    return kept


def _read_top(
    request: GenerateRequest, content: Sequence[Mapping[str, Any]], where: str
) -> tuple[TopLogprobs, ...] | None:
    """The head of every place: the most likely candidates, whichever of them was sampled."""
    if not request.top_logprobs:
        return None
    heads = []
    for row in content:
        found = row.get("top_logprobs") or ()
        if not found:
            raise InferenceError(
                f"{where}: the {request.top_logprobs} most likely tokens of each place were asked for and not "
                "returned; vLLM reports at most --max-logprobs, which has to be one more"
            )
        pairs = [(_candidate_id(entry, where), float(entry["logprob"])) for entry in found]
        best = sorted((pair for pair in pairs if pair[1] > _NO_MASS), key=lambda pair: -pair[1])[: request.top_logprobs]
        ids = np.array([token for token, _ in best], dtype=np.int32)
        heads.append((ids, np.array([_logprob(value, where) for _, value in best], dtype=np.float32)))
    return tuple(heads)


def _candidate_id(entry: Mapping[str, Any], where: str) -> int:
    if "token_id" in entry:
        return int(entry["token_id"])
    name = str(entry["token"])
    if not name.startswith(_PLACEHOLDER):
        raise InferenceError(
            f"{where}: the most likely tokens are named by text ({name!r}), which need not be one token; start the "
            "server with --return-tokens-as-token-ids"
        )
    return int(name.removeprefix(_PLACEHOLDER))


def _read_routes(request: GenerateRequest, tokens: int, text: Any, where: str) -> npt.NDArray[np.int16] | None:
    if not request.routed_experts or not tokens:
        return None
    if text is None:
        raise InferenceError(
            f"{where}: routed experts were asked for and not returned; serve a mixture-of-experts model with "
            "--enable-return-routed-experts"
        )
    routes = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    want = len(request.token_ids) + tokens - 1
    if routes.ndim != 3 or len(routes) < want:  # the last part of a stream knows only its own tokens
        raise InferenceError(f"{where}: routed_experts of shape {routes.shape} do not cover the {want} tokens fed")
    return np.asarray(routes, dtype=np.int16)


def read_choice(
    request: GenerateRequest, choice: Mapping[str, Any], envelope: Mapping[str, Any], where: str, *, last: bool = True
) -> GenerateResult:
    """A choice of the token endpoint as a ``GenerateResult``.

    Raises:
        InferenceError: the answer breaks the contract; the message starts with ``where``.
    """
    try:
        ids = tuple(int(t) for t in choice["token_ids"] or ())
        content = (choice.get("logprobs") or {}).get("content") or ()
        logprobs = tuple(_logprob(row["logprob"], where) for row in content)
        finish = choice.get("finish_reason")
        runs = tuple(VersionRun(str(r["version"]), r["start"], r["end"]) for r in choice.get("weight_versions") or ())
        usage = envelope.get("usage") or {}
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        prompt = _read_prompt_logprobs(request, envelope.get("prompt_logprobs"), where) if last else None
        kept = _read_kept_sets(request, ids, choice.get("sampling_mask"), where)
        top = _read_top(request, content, where)
        routes = _read_routes(request, len(ids), choice.get("routed_experts"), where) if last else None
    except (KeyError, TypeError, ValueError, ContractError) as error:
        raise InferenceError(f"{where}: the answer is not in the contract's form ({error!r})") from error
    if len(logprobs) != len(ids):
        raise InferenceError(f"{where}: {len(logprobs)} log-probs for {len(ids)} tokens")
    if last and finish not in ("stop", "length", "abort"):
        raise InferenceError(f"{where}: finish_reason {finish!r} is not one of stop, length, abort")
    reason: FinishReason = finish if last and finish is not None else "length"
    return GenerateResult(
        request_id=request.request_id,
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=reason,
        stop_reason=choice.get("stop_reason") if last else None,
        versions=runs,
        text=str(choice.get("text") or ""),
        cached_tokens=cached,
        prompt_logprobs=prompt,
        finished=last,
        kept_sets=kept,
        routed_experts=routes,
        top_logprobs=top,
    )


def check_versions(result: GenerateResult, n_tokens: int, where: str) -> None:
    """Version runs cover ``n_tokens`` exactly, else ``InferenceError``."""
    at = 0
    for run in result.versions:
        if run.start != at:
            raise InferenceError(f"{where}: weight_versions leave a gap or overlap at token {at}")
        at = run.end
    if at != n_tokens:
        hint = "; vLLM >= 0.32 is needed" if not result.versions else ""
        raise InferenceError(f"{where}: weight_versions cover {at} of {n_tokens} tokens{hint}")


def refuse_model(asked: str | None, served: Sequence[str]) -> None:
    """A model that is not served is an error."""
    if asked is not None and asked not in served:
        raise UnknownModelError(f"model {asked!r} is not served here; this server has {', '.join(served)}")
