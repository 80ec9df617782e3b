"""Services on the Internet that tools and graders call."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from gym_kit.http_server import Answer, Request, serving

from skyrl_agent import judge


@contextmanager
def serving_openai(
    answer: Answer, headers: Mapping[str, str] | None = None, **variables: str
) -> Iterator[tuple[str, list[Request]]]:
    """Serve OpenAI's API and other services, and point OpenAI's client at it.

    Responses have these further headers. The values of further variables may contain `{url}`. Yields the address and
    the requests so far.
    """
    with serving(answer, headers) as (url, requests), pytest.MonkeyPatch.context() as environment:
        variables = {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "o", **variables}
        for name, value in variables.items():
            environment.setenv(name, value.format(url=url))
        judge._judge.cache_clear()
        yield url, requests
    judge._judge.cache_clear()
