"""Tools that search the web or a local index, and read web pages."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import urllib3

from skyrl_agent.judge import complete
from skyrl_agent.tools.base import BaseTool, ToolUser, register_tool, text_parameters
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.calls import ToolCallError
from skyrl_gym.tools.search import MAX_QUERY_CHARS, SearchToolGroup

TIMEOUT_S = 60.0
MAX_PAGE_CHARS = 100_000
MAX_RETRY_AFTER_S = 30.0
SERVICE_STATUSES = frozenset({401, 402, 403, 407, 408, 421, 425, 429})
"""Client errors that are not about the request: no key, no credit, too many requests, …"""
ENDPOINT_STATUSES = SERVICE_STATUSES | {404, 405, 410}
"""Statuses that are not about the request at a configured address: if it does not exist, the configuration is wrong."""

QUERY = text_parameters(query="What to search for.")

SUMMARY = """Extract everything from this web page that helps to reach the goal, with names, numbers and quotations. \
Write "Nothing on this page helps." if that is so.

Goal: {goal}

Web page:
{page}"""


class _Retry(urllib3.Retry):
    """Retry policy that gives up immediately if the service asks for a pause of more than `MAX_RETRY_AFTER_S`."""

    def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
        seconds = super().get_retry_after(response)
        if seconds is not None and seconds > MAX_RETRY_AFTER_S:
            raise urllib3.exceptions.HTTPError(
                f"status {response.status}, Retry-After {seconds:.0f} s, more than {MAX_RETRY_AFTER_S:g} s"
            )
        return seconds


RETRIES = _Retry(total=3, backoff_factor=1, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=None)


def fetch(
    method: str, url: str, service: str, service_statuses: frozenset[int] = ENDPOINT_STATUSES, **options: Any
) -> bytes:
    """Return the body of a response.

    Raises:
        ToolFailure: the service cannot be reached, fails, or answers with one of `service_statuses`.
        ToolCallError: the service rejects the request for any other reason. The model reads it.
    """
    try:
        response = urllib3.request(method, url, timeout=TIMEOUT_S, retries=RETRIES, **options)
    except urllib3.exceptions.HTTPError as error:
        raise ToolFailure(f"{service}: {error}") from error
    if response.status >= 400:
        text = f"{service} answered with status {response.status}: {response.data[:200]!r}"
        is_failure = response.status >= 500 or response.status in service_statuses
        raise ToolFailure(text) if is_failure else ToolCallError(text)
    return response.data


def read_env_var(name: str, service: str) -> str:
    """Return an environment variable. Raises ToolFailure if it is not set."""
    value = os.environ.get(name)
    if not value:
        raise ToolFailure(f"{service} needs the environment variable {name}")
    return value


@register_tool("local_search")
class LocalSearch(BaseTool):
    """Search with the retrieval server at LOCAL_SEARCH_URL, such as `python -m skyrl_gym.retrieval`."""

    description = "Search the encyclopedia for passages."
    parameters = QUERY

    def call(self, params: dict[str, Any], *, agent: ToolUser, trajectory_id: str) -> str:
        url = os.environ.get("LOCAL_SEARCH_URL", "http://127.0.0.1:8000/retrieve")
        n_documents = int(os.environ.get("LOCAL_SEARCH_TOP_K", "3"))
        group = SearchToolGroup(url, n_documents, TIMEOUT_S, log_requests=False, raise_failures=True)
        return str(json.loads(group.search(params["query"]))["result"])


@register_tool("faiss_search")
class FaissSearch(LocalSearch):
    """An alias of `local_search`, for SkyRL-Agent's FAISS server."""


@register_tool("search_engine")
class SearchEngine(BaseTool):
    """Search the web with Serper. GOOGLE_SEARCH_KEY is the key, SERPER_URL an alternative address."""

    service: ClassVar[str] = "Serper"
    description = "Search the web. Returns titles, addresses and excerpts of the first results."
    parameters = QUERY

    def call(self, params: dict[str, Any], *, agent: ToolUser, trajectory_id: str) -> str:
        hits = self._search(params["query"][:MAX_QUERY_CHARS])
        results = [f"[{i}] {title}\n{link}\n{text}" for i, (title, link, text) in enumerate(hits, start=1)]
        return "\n\n".join(results) or "No results found."

    def _search(self, query: str) -> list[tuple[str, str, str]]:
        url = os.environ.get("SERPER_URL", "https://google.serper.dev/search")
        headers = {"X-API-KEY": read_env_var("GOOGLE_SEARCH_KEY", self.service)}
        found = json.loads(fetch("POST", url, self.service, json={"q": query}, headers=headers))
        return [(hit.get("title", ""), hit.get("link", ""), hit.get("snippet", "")) for hit in found.get("organic", [])]


@register_tool("youcom_search_engine")
class YouComSearch(SearchEngine):
    """Search the web with You.com. YOUCOM_API_KEY is the key, YOUCOM_URL an alternative address."""

    service = "You.com"

    def _search(self, query: str) -> list[tuple[str, str, str]]:
        url = os.environ.get("YOUCOM_URL", "https://ydc-index.io/v1/search")
        headers = {"X-API-Key": read_env_var("YOUCOM_API_KEY", self.service)}
        found = json.loads(fetch("GET", url, self.service, fields={"query": query}, headers=headers))
        hits = found.get("results", {}).get("web", [])
        return [(hit.get("title", ""), hit.get("url", ""), "\n".join(hit.get("snippets", []))) for hit in hits]


@register_tool("web_browser")
class WebBrowser(BaseTool):
    """Read a web page as text with Jina's reader, and let a model extract the relevant parts.

    JINA_API_KEY is the reader's key, JINA_URL an alternative address. `skyrl_agent.judge.complete` runs the model named
    by WEB_SUMMARY_MODEL. Without it, the whole page is returned.
    """

    description = "Read a web page and extract what helps to reach a goal."
    parameters = text_parameters(url="The address of the page.", goal="What you want to find out.")

    def call(self, params: Mapping[str, Any], *, agent: ToolUser, trajectory_id: str) -> str:
        reader = os.environ.get("JINA_URL", "https://r.jina.ai").rstrip("/")
        key = os.environ.get("JINA_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        page = fetch("GET", f"{reader}/{params['url']}", "the reader of web pages", SERVICE_STATUSES, headers=headers)
        text = page.decode("utf-8", "replace")[:MAX_PAGE_CHARS]
        model = os.environ.get("WEB_SUMMARY_MODEL")
        return complete(model, SUMMARY.format(goal=params["goal"], page=text)) if model else text
