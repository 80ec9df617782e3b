"""Several judges with one rubric, and their settings file."""

import asyncio
import statistics
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from skyrl_gym.error import InvalidSettings
from skyrl_gym.judges.judge import Comparison, Judge, Judgement, JudgeSettings
from skyrl_gym.judges.rubric import CORRECTNESS, Rubric


class PanelSettings(BaseModel):
    """One or more judges, their rubric, and the rule that combines their verdicts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    judges: Annotated[tuple[JudgeSettings, ...], Field(min_length=1)]
    rubric: Rubric = CORRECTNESS
    combine: Literal["mean", "majority"] = "mean"
    """The mean score, or the verdict of most judges on each criterion. A tie is unknown."""
    quorum: Annotated[int, Field(ge=1)] | None = None
    """Minimum number of judges with a verdict. Defaults to more than half of them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quorum is not None and self.quorum > len(self.judges):
            raise ValueError(f"quorum={self.quorum} exceeds the number of judges, {len(self.judges)}; lower it")
        if any(judge in self.judges[:i] for i, judge in enumerate(self.judges)):
            raise ValueError("two judges are the same; give each a different model or sampling_params.seed")
        return self


class Panel:
    """Judges with one rubric. Thread-safe, and its calls block, except the coroutine functions."""

    def __init__(self, settings: PanelSettings) -> None:
        """Create the judges. Raise ValueError if one cannot be used."""
        self.settings, self.rubric = settings, settings.rubric
        self.judges = [Judge(judge) for judge in settings.judges]
        self._quorum = settings.quorum or len(self.judges) // 2 + 1
        n_threads = max(judge.max_concurrency for judge in settings.judges)
        self._threads = ThreadPoolExecutor(n_threads, "judge")

    def judge(
        self, question: str, response: str, reference: str | None = None, stop: threading.Event | None = None
    ) -> Judgement:
        """Judge a response. `reference` is the correct answer, if known."""
        results = [judge.judge(self.rubric, question, response, reference, stop) for judge in self.judges]
        known = [result for result in results if result.score is not None]
        if len(known) < self._quorum:
            problems = "; ".join(result.problem for result in results if result.problem)
            partial = results[0].verdicts if len(results) == 1 else {}
            return Judgement(None, partial, f"{len(known)} of {len(results)} judges gave a verdict: {problems}")
        if len(known) == 1:
            return known[0]
        verdicts = {c.name: _vote([result.verdicts[c.name] for result in known]) for c in self.rubric.criteria}
        if self.settings.combine == "mean":
            return Judgement(statistics.fmean(result.score for result in known if result.score is not None), verdicts)
        score = self.rubric.score(verdicts)
        return Judgement(score, verdicts, "the judges tie" if score is None else None)

    def compare(self, question: str, a: str, b: str, reference: str | None = None) -> Comparison | None:
        """Return the response that most judges prefer, "tie" if there is none, or None without a quorum."""
        results = [judge.compare(self.rubric, question, a, b, reference) for judge in self.judges]
        known = [result for result in results if result is not None]
        return (_vote(known) or "tie") if len(known) >= self._quorum else None

    async def judge_async(self, question: str, response: str, reference: str | None = None) -> Judgement:
        """Run `judge` in a thread. A cancelled call retries no more."""
        stop = threading.Event()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self.judge, question, response, reference, stop)
        finally:
            stop.set()

    async def compare_async(self, question: str, a: str, b: str, reference: str | None = None) -> Comparison | None:
        """Run `compare` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.compare, question, a, b, reference)

    def as_reward_function(self) -> Callable[[Sequence[Any]], Awaitable[list[float | None]]]:
        """Return a function for `skyrl_train.generators.rewards.register_reward_function`.

        The reference is the row's `reward_spec["ground_truth"]`, if the row has one. An unknown score makes the sample
        invalid.
        """

        async def score(samples: Sequence[Any]) -> list[float | None]:
            judgements = await asyncio.gather(
                *(self.judge_async(s.prompt, s.response, find_reference(s.trajectory.env_extras)) for s in samples)
            )
            return [judgement.score for judgement in judgements]

        return score

    def close(self) -> None:
        """End the threads and close the judges."""
        self._threads.shutdown(cancel_futures=True)
        for judge in self.judges:
            judge.close()


def load_panel(path: str | Path) -> Panel:
    """Read a panel from a YAML file with the fields of `PanelSettings`. Raise InvalidSettings if it is invalid."""
    try:
        return Panel(PanelSettings.model_validate(yaml.safe_load(Path(path).read_text("utf-8"))))
    except OSError as error:
        raise InvalidSettings(f"the judges' file {path} cannot be read: {error.strerror}") from error
    except (ValidationError, ValueError, yaml.YAMLError) as error:
        raise InvalidSettings(f"the judges' file {path} is invalid: {error}") from error


def find_reference(row: Any) -> str | None:
    """Return a row's ground truth as text, or None."""
    for name in ("reward_spec", "reward_model"):
        truth = (row.get(name) or {}).get("ground_truth")
        if truth is not None:
            return str(truth)
    return None


def _vote(values: Sequence[Any]) -> Any:
    """Return the most frequent value, or None if several are."""
    (first, *others) = Counter(values).most_common()
    return None if others and others[0][1] == first[1] else first[0]
