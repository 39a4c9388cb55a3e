"""SkyRL's search tool: passages from a retrieval server.

Owns: ``SearchToolGroup``.  Refuses: turning a server that is gone into an observation.  SkyRL shows the model the error
and lets the sample earn what it then earns; here the failure leaves the environment as a fault, so that the sample is
tried again and never trained on.

    SearchToolGroup("http://127.0.0.1:8000/retrieve").search("capital of Norway")
    # '{"result": "Doc 1: Oslo is ..."}'
"""

from __future__ import annotations

import json
import logging
import time
from functools import cache
from typing import Any

import httpx

from slipstream.envs.tools import ToolGroup, tool
from slipstream.errors import EnvironmentFault

_LOG = logging.getLogger(__name__)
_ATTEMPTS = 4
"""SkyRL's ten, with their pauses, take longer than a step of an environment may (``rollout.env_step_seconds``)."""
_FIRST_PAUSE = 1.0
"""Seconds before the second attempt; each pause is longer by as much."""


@cache
def _client() -> httpx.Client:
    """One for the process, safe in threads; connections are reused."""
    return httpx.Client(limits=httpx.Limits(max_connections=256, max_keepalive_connections=256))


class SearchToolGroup(ToolGroup):
    """SkyRL's search tool.

    Args:
        search_url: takes ``{"query", "topk", "return_scores"}`` and answers ``{"result": [[{"document": {"contents"}},
            ...]]}``.
        topk: passages per query.
        timeout: seconds of one attempt.
        log_requests: log each query.
        attempts: tries when the server is unreachable, late or answers with a 5xx.
    """

    def __init__(
        self,
        search_url: str = "http://127.0.0.1:8000/retrieve",
        topk: int = 3,
        timeout: float = 30,
        log_requests: bool = True,
        attempts: int = _ATTEMPTS,
    ) -> None:
        self.search_url, self.topk, self.timeout = search_url, topk, timeout
        self.log_requests, self.attempts = log_requests, attempts
        super().__init__(name="SearchToolGroup")

    @tool
    def search(self, query: str | None) -> str:
        """JSON ``{"result": passages}``; "" for no query.

        Raises ``EnvironmentFault`` naming the server when it cannot be asked, or answers something else.
        """
        if query is None:
            return ""
        if self.log_requests:
            _LOG.info("search %s: %s", self.search_url, query)
        answer = self._ask({"query": query.strip(), "topk": self.topk, "return_scores": True})
        try:
            lists = answer["result"]
            texts = [
                "".join(f"Doc {i}: {found['document']['contents'].strip()}\n" for i, found in enumerate(documents, 1))
                for documents in lists
            ]
        except (AttributeError, KeyError, TypeError) as error:
            raise EnvironmentFault(
                f"{self.search_url} answers {str(answer)[:200]!r}; a retrieval server answers "
                '{"result": [[{"document": {"contents": ...}}, ...]]}'
            ) from error
        return json.dumps({"result": "\n---\n".join(texts) if texts else "No search results found."})

    def _ask(self, body: dict[str, Any]) -> Any:
        why = ""
        for attempt in range(1, self.attempts + 1):
            try:
                response = _client().post(self.search_url, json=body, timeout=self.timeout)
                if response.status_code < 500:
                    response.raise_for_status()
                    return response.json()
                why = f"HTTP {response.status_code}"
            except httpx.HTTPStatusError as error:
                raise EnvironmentFault(f"{self.search_url} refuses the query: {error}; check search_url") from error
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            except ValueError as error:
                raise EnvironmentFault(f"{self.search_url} answers no JSON ({error})") from error
            if attempt < self.attempts:
                time.sleep(_FIRST_PAUSE * attempt)
        raise EnvironmentFault(f"{self.search_url} does not answer ({why}, {self.attempts} attempts); is it running?")
