"""The conformance suite runs against engines in process and over HTTP, and finds engines that break the contract."""

import dataclasses
import importlib.util

import pytest

from fakes import ByteTokenizer
from slipstream.errors import RequestError
from slipstream.inference.client import HttpEngine
from slipstream.inference.conformance import CHECKS, run_conformance
from slipstream.inference.fake import FakeEngine
from slipstream.inference.server import build_app
from slipstream.trajectory import SamplingSpec, VersionRun

TOKENIZER = ByteTokenizer()
VOCAB = 259


class AsciiEngine(FakeEngine):
    """Mostly printable output, so that stop strings have something to match."""

    def __init__(self, **options):
        super().__init__(
            VOCAB,
            eos_token_ids=(257,),
            tokenizer=TOKENIZER,
            scale=1.0,
            max_model_len=512,
            step_seconds=0.0005,
            **options,
        )
        self.weights["head.bias"][:] = -6
        self.weights["head.bias"][97:123] = 0
        self.weights["head.bias"][list(self._eos)] = -1


def failed(results):
    return {r.name: r.detail for r in results if r.status == "failed"}


async def test_fake_engine_conforms_in_process():
    engine = AsciiEngine()
    weights = {name: tensor.copy() for name, tensor in engine.weights.items()}
    results = await run_conformance(engine, TOKENIZER, weights=weights)
    assert failed(results) == {}
    assert {r.name for r in results if r.status == "skipped"} == {n for n in CHECKS if n.startswith("http_")}


@pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="weights travel as safetensors")
async def test_fake_engine_conforms_over_http(tmp_path):
    engine = AsciiEngine()
    weights = {name: tensor.copy() for name, tensor in engine.weights.items()}
    app = build_app(engine, TOKENIZER, transfer_root=tmp_path)
    async with HttpEngine.in_process(app, transfer_dir=tmp_path) as client:
        results = await run_conformance(client, TOKENIZER, weights=weights)
    assert [(r.name, r.detail) for r in results if r.status != "passed"] == []


@pytest.mark.slow
@pytest.mark.parametrize("over_http", [False, True])
async def test_embedded_engine_conforms(over_http, tmp_path):
    pytest.importorskip("torch")
    from slipstream.config.settings import InferenceSettings
    from slipstream.inference.embedded.engine import EmbeddedEngine
    from slipstream.inference.embedded.tiny import tiny_model

    model, tokenizer = tiny_model(seed=0)
    engine = EmbeddedEngine(model, tokenizer, InferenceSettings(dtype="float32", kv_cache_tokens=8192))
    await engine.start()
    try:
        held = await engine.checksum()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in held}
        app = build_app(engine, tokenizer, transfer_root=tmp_path)
        under_test = HttpEngine.in_process(app, transfer_dir=tmp_path) if over_http else engine
        await under_test.start()
        results = await run_conformance(under_test, tokenizer, weights=weights, tolerance=1e-3)
        await under_test.close()
    finally:
        await engine.close()
    assert failed(results) == {}
    skipped = {r.name for r in results if r.status == "skipped"}
    assert skipped == (set() if over_http else {n for n in CHECKS if n.startswith("http_")})


class RawLogprobs(AsciiEngine):
    """Reports log-probs before temperature and truncation."""

    async def generate(self, request):
        result = await super().generate(request)
        plain = dataclasses.replace(request, request_id=request.request_id + "x", sampling=SamplingSpec())
        ids = (*plain.token_ids, *result.token_ids)
        scored = self._prompt_logprobs(dataclasses.replace(plain, token_ids=ids))
        return dataclasses.replace(result, logprobs=scored[len(plain.token_ids) :])


class ClientSideVersions(AsciiEngine):
    """Stamps the version at the end of the request on all its tokens."""

    async def generate(self, request):
        result = await super().generate(request)
        return dataclasses.replace(result, versions=(VersionRun(self._version, 0, len(result.token_ids)),))


class AnswersWhilePaused(AsciiEngine):
    async def pause(self, mode="abort"):
        await super().pause(mode)
        self._admit = self._decoding = True

    async def is_paused(self):
        return True


class DropsTheStopToken(AsciiEngine):
    def _result(self, run):
        result = super()._result(run)
        if not isinstance(result.stop_reason, str):
            return result
        n = len(result.token_ids) - 1
        return dataclasses.replace(
            result,
            token_ids=result.token_ids[:n],
            logprobs=result.logprobs[:n],
            versions=(VersionRun(self._version, 0, n),) if n else (),
        )


class UnseededNoise(AsciiEngine):
    def _enter(self, request):
        return super()._enter(dataclasses.replace(request, seed=len(self.requests)))


class StaleCache(AsciiEngine):
    async def reset_prefix_cache(self):
        pass


@pytest.mark.parametrize(
    ("engine", "check"),
    [
        (RawLogprobs, "logprobs_follow_truncation"),
        (ClientSideVersions, "versions_cover_an_update"),
        (AnswersWhilePaused, "new_requests_queue_while_paused"),
        (DropsTheStopToken, "stop_string_keeps_the_whole_token"),
        (UnseededNoise, "seeds_reproduce"),
        (StaleCache, "prefix_cache_resets"),
    ],
)
async def test_suite_finds_an_engine_that_breaks_the_contract(engine, check):
    results = await run_conformance(engine(), TOKENIZER, only=[check])
    assert list(failed(results)) == [check]


async def test_unknown_check_name_is_refused():
    with pytest.raises(RequestError, match="no_such_check"):
        await run_conformance(AsciiEngine(), TOKENIZER, only=["no_such_check"])
