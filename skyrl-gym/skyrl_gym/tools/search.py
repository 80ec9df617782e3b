"""A search tool backed by a retrieval server, such as `python -m skyrl_gym.retrieval`.

POST {"query": "…", "topk": 3, "return_scores": true} returns {"result": [[{"document": {"contents": "…"}, "score":
0.7}, …]]}.
"""

import json
import logging
import math
import threading
import time
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import urllib3

from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.core import ToolGroup, tool

logger = logging.getLogger(__name__)

N_ATTEMPTS = 10
DELAY_SECONDS = 1.0  # after the first attempt. After attempt n, n times as long.
RETRIED_STATUSES = (429, 500, 502, 503, 504)
QUERY_STATUSES = (400, 413, 414, 422)
POOL_SIZE = 256  # connections to one server
MAX_QUERY_CHARS = 10_000  # far more than a search needs: longer queries would only keep the server busy

_pools: dict[str, urllib3.PoolManager] = {}
_pools_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """The reason why a request failed. Its text is for logs and for the model.

    is_transient: True if another attempt may succeed: the server is busy, down or slow.
    is_refusal: True if the query is at fault, not the server.
    """

    text: str
    is_transient: bool = False
    is_refusal: bool = False

    def __str__(self) -> str:
        return self.text


def call_search_api(
    retrieval_service_url: str,
    query: str,
    topk: int = 3,
    return_scores: bool = True,
    timeout: float = 30,
    log_requests: bool = True,
    session: urllib3.PoolManager | None = None,
) -> tuple[dict[str, Any] | None, SearchProblem | None]:
    """Query a retrieval server. Return (answer, None) or (None, problem). `timeout` is in seconds per attempt.

    A server that is busy, down or slow gets ten attempts, with 45 seconds of delays in total.
    """
    pool = session or pool_for(retrieval_service_url)
    body = {"query": query.encode("utf-8", "replace").decode("utf-8"), "topk": topk, "return_scores": return_scores}
    attempt = 1
    while True:
        if log_requests:
            logger.info("search, attempt %d: %s", attempt, query)
        answer = _send_request(pool, retrieval_service_url, body, timeout)
        if not isinstance(answer, SearchProblem):
            return answer, None
        if not answer.is_transient:
            return None, answer
        if attempt == N_ATTEMPTS:
            return None, replace(answer, text=f"{answer} (after {N_ATTEMPTS} attempts)")
        time.sleep(DELAY_SECONDS * attempt)
        attempt += 1


def pool_for(url: str) -> urllib3.PoolManager:
    """Return the connection pool of a server, shared by all tools of this process."""
    parts = urlsplit(url)
    with _pools_lock:
        return _pools.setdefault(
            f"{parts.scheme}://{parts.netloc}", urllib3.PoolManager(maxsize=POOL_SIZE, block=False, retries=False)
        )


def _send_request(
    pool: urllib3.PoolManager, url: str, body: dict[str, Any], timeout: float
) -> dict[str, Any] | SearchProblem:
    """Send one request. Return the answer, or the problem with it."""
    try:
        response = pool.request("POST", url, json=body, timeout=timeout, headers={"Accept": "application/json"})
    except (urllib3.exceptions.TimeoutError, urllib3.exceptions.ProtocolError) as error:
        return SearchProblem(f"{type(error).__name__}: {error}", is_transient=True)
    except urllib3.exceptions.HTTPError as error:
        return SearchProblem(f"{type(error).__name__}: {error}")
    if response.status in RETRIED_STATUSES:
        return SearchProblem(f"the server answered with status {response.status}", is_transient=True)
    if response.status >= 400:
        is_refusal = response.status in QUERY_STATUSES
        subject = "the server rejected the query with" if is_refusal else "the server answered with"
        return SearchProblem(f"{subject} status {response.status}: {response.data[:200]!r}", is_refusal=is_refusal)
    try:
        answer = json.loads(response.data)
    except ValueError:
        return SearchProblem(f"the server's answer is not JSON: {response.data[:200]!r}")
    if not isinstance(answer, dict):
        return SearchProblem(f"the server's answer is not an object: {response.data[:200]!r}")
    return answer


class SearchToolGroup(ToolGroup):
    """The tool `search`."""

    def __init__(
        self,
        search_url: str = "http://127.0.0.1:8000/retrieve",
        topk: int = 3,
        timeout: float = 30,
        log_requests: bool = True,
        raise_failures: bool = False,
    ) -> None:
        """Search with the server at `search_url` for `topk` documents.

        With `raise_failures`, a failing server raises an error. Otherwise, or if the server rejects the query itself,
        the result explains the problem to the model.
        """
        super().__init__(name="SearchToolGroup")
        if not search_url.startswith(("http://", "https://")):
            raise ValueError(f"search_url={search_url!r} must start with http:// or https://")
        for name, value in (("topk", topk), ("timeout", timeout)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} of a search must be positive")
        self.search_url = search_url
        self.topk = topk
        self.timeout = timeout
        self._log_requests = log_requests
        self._raise_failures = raise_failures

    @tool
    def search(self, query: str | None) -> str:
        """Search for documents.

        Args:
            query: search query
        """
        if query is None:
            return ""
        answer, problem = call_search_api(
            retrieval_service_url=self.search_url,
            query=query[:MAX_QUERY_CHARS],
            topk=self.topk,
            return_scores=True,
            timeout=self.timeout,
            log_requests=self._log_requests,
            session=pool_for(self.search_url),
        )
        if problem is not None:
            if self._raise_failures and not problem.is_refusal:
                raise ToolFailure(f"search at {self.search_url}: {problem}")
            return json.dumps({"result": f"Search error: {problem}"})
        return json.dumps({"result": _text(answer or {})})


def _text(answer: dict[str, Any]) -> str:
    """Format the documents for the model, numbered from 1 in each list."""
    lists = [
        "".join(f"Doc {i}: {_contents(hit)}\n" for i, hit in enumerate(documents, start=1))
        for documents in answer.get("result") or []
    ]
    return "\n---\n".join(lists) if any(lists) else "No search results found."


def _contents(hit: Any) -> str:
    document = hit.get("document", hit) if isinstance(hit, dict) else hit
    return str(document.get("contents", "")) if isinstance(document, dict) else str(document)
