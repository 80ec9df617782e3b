"""One language model as a judge, behind an OpenAI-compatible API."""

import hashlib
import json
import logging
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from skyrl_gym.chat_endpoint import ChatEndpoint, EndpointConfig, EndpointError
from skyrl_gym.judges.rubric import Criterion, Rubric, Verdict
from skyrl_gym.judges.verdict import PAIRWISE, POINTWISE, create_mark, parse_verdict, split_control_tokens

logger = logging.getLogger(__name__)

Comparison = Literal["a", "b", "tie"]
RESERVED = ("messages", "model", "n", "response_format", "stream", "tools")
PREFERENCE = Criterion(name="better", text="The better response.")


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a judge, e.g. ``Judgement(1.0, {"correct": True})``. A score of None is unknown.

    problem: why the score is unknown, or None.
    """

    score: float | None
    verdicts: dict[str, Verdict | None] = field(default_factory=dict)
    problem: str | None = None


class JudgeSettings(BaseModel):
    """A judge's model, limits and prompts. `api_key_env` names the environment variable with the API key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    base_url: str = "https://api.openai.com/v1"
    api_key_env: str = ""
    sampling_params: dict[str, Any] = Field(default={"temperature": 0})
    """Further fields of each request. A `seed` distinguishes judges with the same model."""
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    n_attempts: Annotated[int, Field(ge=1)] = 4
    """Maximum number of requests per reply, with growing pauses, if the server fails."""
    max_concurrency: Annotated[int, Field(ge=1)] = 16
    """Maximum number of open requests."""
    cache: str | None = None
    """File of earlier verdicts, shared by runs. By default, they are kept in memory."""
    max_requests: Annotated[int, Field(ge=1)] | None = None
    """Budget of a process, in requests. All later scores are unknown."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Budget of a process, in tokens of prompts and replies. Open requests may exceed it."""
    template: str = POINTWISE
    pair_template: str = PAIRWISE

    @model_validator(mode="after")
    def _check(self) -> Self:
        if reserved := sorted(set(RESERVED) & self.sampling_params.keys()):
            raise ValueError(f"sampling_params sets {', '.join(reserved)}, but the judge sets them itself; remove them")
        for key, responses in (("template", ["response"]), ("pair_template", ["response_a", "response_b"])):
            names = ["question", "criteria", "mark", "verdicts", *responses]
            try:
                text = getattr(self, key).format(**{name: f"{{{name}}}" for name in names})
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(f"{key} has an invalid field, {error!r}; its fields are {', '.join(names)}") from error
            if missing := [name for name in ("mark", "verdicts", *responses) if f"{{{name}}}" not in text]:
                raise ValueError(f"{key} has no {{{missing[0]}}}; add it")
        return self


class BudgetExceeded(Exception):
    """The budget of requests or tokens is used up."""


class Judge:
    """A judge. Thread-safe, and its calls block. Its budget and open requests are those of this process."""

    def __init__(self, settings: JudgeSettings) -> None:
        """Open the cache. Raise ValueError if the URL is invalid or the variable of the API key is not set."""
        self.settings = settings
        config = EndpointConfig(
            **settings.model_dump(
                include={"base_url", "model", "api_key_env", "sampling_params", "timeout_seconds", "n_attempts"}
            )
        )
        self._endpoint = ChatEndpoint(config, settings.max_concurrency)
        self._slots = threading.BoundedSemaphore(settings.max_concurrency)
        self._lock = threading.Lock()  # of the budget and the cache
        self.n_requests = self.n_tokens = 0
        self._is_spent = False
        self._cache = sqlite3.connect(settings.cache or ":memory:", timeout=60, check_same_thread=False)
        self._cache.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, value TEXT)")
        self._cache.commit()

    def judge(
        self,
        rubric: Rubric,
        question: str,
        response: str,
        reference: str | None = None,
        stop: threading.Event | None = None,
    ) -> Judgement:
        """Judge a response. `reference` is the correct answer, if known. `stop` ends the retries."""
        texts = {"response": response}
        values, problem = self._ask(self.settings.template, rubric, rubric.criteria, question, texts, reference, stop)
        verdicts = {c.name: _to_verdict(values.get(c.name), c) for c in rubric.criteria}
        return Judgement(rubric.score(verdicts), verdicts, problem)

    def compare(self, rubric: Rubric, question: str, a: str, b: str, reference: str | None = None) -> Comparison | None:
        """Return the better response by two verdicts, one in each order. They tie if the verdicts differ.

        None if a verdict is unknown.
        """
        results = []
        for first, second in ((a, b), (b, a)):
            texts = {"response_a": first, "response_b": second}
            values, _ = self._ask(self.settings.pair_template, rubric, (PREFERENCE,), question, texts, reference, None)
            results.append(values.get(PREFERENCE.name))
        if None in results:
            return None
        swapped = {"a": "b", "b": "a"}.get(results[1] or "", "tie")
        return results[0] if results[0] == swapped else "tie"  # type: ignore[return-value]

    def close(self) -> None:
        """Close the connections and the cache."""
        self._endpoint.close()
        self._cache.close()

    def _ask(
        self,
        template: str,
        rubric: Rubric,
        asked: Sequence[Criterion],
        question: str,
        texts: dict[str, str],
        reference: str | None,
        stop: threading.Event | None,
    ) -> tuple[dict[str, str], str | None]:
        """Return the verdicts by criterion, and the problem if one is missing. Complete verdicts are cached."""
        s = self.settings
        content = [s.base_url, s.model, s.sampling_params, template, rubric.model_dump(), question, texts, reference]
        key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode("utf-8", "replace")).hexdigest()
        with self._lock:
            row = self._cache.execute("SELECT value FROM verdicts WHERE key = ?", (key,)).fetchone()
        if row:
            return json.loads(row[0]), None
        mark = create_mark()
        prompt = template.format(
            mark=mark,
            question=split_control_tokens(question),
            criteria=_format_criteria(rubric, reference),
            verdicts="\n".join(f"{c.name} {mark}: {'A, B or tie' if c is PREFERENCE else c.choices}" for c in asked),
            **{name: split_control_tokens(text) for name, text in texts.items()},
        )
        try:
            reply = self._endpoint.complete([{"role": "user", "content": prompt}], self._open_request, stop)
        except (EndpointError, BudgetExceeded) as error:
            return {}, str(error)
        self._charge(reply.n_tokens)
        if reply.finish_reason not in ("stop", None):
            return {}, f"the judge {s.model} stopped early: finish_reason={reply.finish_reason!r}"
        judged = [question, *texts.values()]
        found = {c.name: parse_verdict(reply.text, c.name, _values(c), mark, judged) for c in asked}
        values = {name: value for name, value in found.items() if value is not None}
        if missing := [name for name in found if name not in values]:
            return values, f"the judge {s.model} gave no verdict on {', '.join(missing)}: {reply.text[-200:]!r}"
        with self._lock, self._cache:
            self._cache.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, json.dumps(values)))
        return values, None

    @contextmanager
    def _open_request(self) -> Iterator[None]:
        """Wait for a slot and count a request. Raise BudgetExceeded, with a warning the first time."""
        with self._slots:
            with self._lock:
                for name, used in (("max_requests", self.n_requests), ("max_tokens", self.n_tokens)):
                    limit = getattr(self.settings, name)
                    if limit is not None and used >= limit:
                        self._exceed(f"{name}={limit} of the judge {self.settings.model} is used up")
                self.n_requests += 1
            yield

    def _exceed(self, problem: str) -> None:
        if not self._is_spent:
            self._is_spent = True
            logger.warning("%s; all later scores are unknown. Raise it to judge more", problem)
        raise BudgetExceeded(problem)

    def _charge(self, n_tokens: int | None) -> None:
        """Count the tokens of a reply. A server that reports none would exceed the budget unnoticed."""
        with self._lock:
            if n_tokens is not None:
                self.n_tokens += n_tokens
            elif self.settings.max_tokens is not None:
                logger.warning(
                    "The judge %s reports no usage, so max_tokens=%d cannot be kept; use max_requests",
                    *(self.settings.model, self.settings.max_tokens),
                )
                self.n_tokens = self.settings.max_tokens


def _values(criterion: Criterion) -> str:
    if criterion is PREFERENCE:
        return "a|b|tie"
    if criterion.scale is None:
        return "yes|no"
    return "|".join(str(grade) for grade in range(criterion.scale, -1, -1))


def _to_verdict(value: str | None, criterion: Criterion) -> Verdict | None:
    if value is None:
        return None
    return value == "yes" if criterion.scale is None else int(value)


def _format_criteria(rubric: Rubric, reference: str | None) -> str:
    lines = ["Criteria:"]
    for criterion in rubric.criteria:
        lines.append(f"- {criterion.name}: {criterion.text}")
        if criterion.reference is not None:
            lines.append(f"  Reference for {criterion.name}: {criterion.reference}")
    if reference is not None:
        lines.append(f"\nCorrect answer:\n{split_control_tokens(reference)}")
    return "\n".join(lines)
