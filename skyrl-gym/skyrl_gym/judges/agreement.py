"""Agreement of judges with labelled samples."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyrl_gym.error import InvalidSettings
from skyrl_gym.judges.panel import Panel

UNKNOWN = "unknown"


class LabelledSample(BaseModel):
    """A line of a file of labelled samples. `label` is true for a score of at least 0.5."""

    model_config = ConfigDict(extra="ignore")

    question: str
    response: str
    reference: str | None = None
    label: bool
    criteria: dict[str, bool | int] = {}
    """Labels of criteria, by name."""


class LabelledPair(BaseModel):
    """A pair of responses, with the better one as the label."""

    model_config = ConfigDict(extra="ignore")

    question: str
    response_a: str
    response_b: str
    reference: str | None = None
    label: Literal["a", "b", "tie"]


class _Line(BaseModel):
    sample: Annotated[LabelledSample | LabelledPair, Field(union_mode="smart")]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Pairs of labels and verdicts, counted per criterion, e.g. ``Agreement({"all": Counter({("yes", "no"): 1})})``.

    An unknown verdict agrees with no label.
    """

    confusions: dict[str, Counter[tuple[str, str]]]

    @property
    def accuracy(self) -> float:
        """Share of samples with the labelled result."""
        return accuracy(self.confusions["all"])

    def __str__(self) -> str:
        lines = []
        for name, confusion in self.confusions.items():
            n_unknown = sum(n for (_, verdict), n in confusion.items() if verdict == UNKNOWN)
            lines.append(
                f"{name}: {confusion.total()} samples, accuracy {accuracy(confusion):.3f}, Cohen's kappa "
                f"{cohens_kappa(confusion):.3f}, unknown {n_unknown / confusion.total():.3f}"
            )
            lines.extend(
                f"    label {label:<8} verdict {verdict:<8} {n}" for (label, verdict), n in sorted(confusion.items())
            )
        return "\n".join(lines)


def accuracy(confusion: Counter[tuple[str, str]]) -> float:
    """Return the share of verdicts that equal the label.

    >>> accuracy(Counter({("yes", "yes"): 3, ("no", "yes"): 1}))
    0.75
    """
    return sum(n for (label, verdict), n in confusion.items() if label == verdict) / confusion.total()


def cohens_kappa(confusion: Counter[tuple[str, str]]) -> float:
    """Return the agreement beyond chance among known verdicts, (p_o - p_e) / (1 - p_e).

    NaN if p_e is 1 or no verdict is known.

    >>> cohens_kappa(Counter({("yes", "yes"): 20, ("yes", "no"): 5, ("no", "yes"): 10, ("no", "no"): 15}))
    0.4

    Source: A coefficient of agreement for nominal scales (Cohen, 1960).
    """
    known = Counter({pair: n for pair, n in confusion.items() if pair[1] != UNKNOWN})
    n, labels, verdicts = known.total(), Counter[str](), Counter[str]()
    if not n:
        return float("nan")
    for (label, verdict), count in known.items():
        labels[label] += count
        verdicts[verdict] += count
    by_chance = sum(labels[value] * verdicts[value] for value in labels)  # times n²
    if by_chance == n * n:
        return float("nan")
    n_agreed = sum(count for (label, verdict), count in known.items() if label == verdict)
    return (n_agreed * n - by_chance) / (n * n - by_chance)


def measure_agreement(panel: Panel, path: Path) -> Agreement:
    """Judge the samples of a JSONL file. Raise InvalidSettings if a line is not a labelled sample."""
    samples = list(_read_samples(path, panel))
    return asyncio.run(_measure(panel, samples))


async def _measure(panel: Panel, samples: list[LabelledSample | LabelledPair]) -> Agreement:
    results = await asyncio.gather(*(_judge(panel, sample) for sample in samples))
    confusions: dict[str, Counter[tuple[str, str]]] = {"all": Counter()}
    for result in results:
        for name, pair in result.items():
            confusions.setdefault(name, Counter())[pair] += 1
    return Agreement(confusions)


async def _judge(panel: Panel, sample: LabelledSample | LabelledPair) -> dict[str, tuple[str, str]]:
    """Return label and verdict, by criterion."""
    if isinstance(sample, LabelledPair):
        texts = (sample.question, sample.response_a, sample.response_b, sample.reference)
        return {"all": (sample.label, await panel.compare_async(*texts) or UNKNOWN)}
    judgement = await panel.judge_async(sample.question, sample.response, sample.reference)
    is_good = None if judgement.score is None else judgement.score >= 0.5
    pairs = {"all": (_format(sample.label), _format(is_good))}
    for name, label in sample.criteria.items():
        pairs[name] = (_format(label), _format(judgement.verdicts.get(name)))
    return pairs


def _format(verdict: bool | int | None) -> str:
    if verdict is None:
        return UNKNOWN
    return ("yes" if verdict else "no") if isinstance(verdict, bool) else str(verdict)


def _read_samples(path: Path, panel: Panel) -> Iterable[LabelledSample | LabelledPair]:
    names = {criterion.name for criterion in panel.rubric.criteria}
    n_samples = 0
    for number, line in enumerate(path.read_text("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            sample = _Line.model_validate({"sample": json.loads(line)}).sample
        except (json.JSONDecodeError, ValidationError) as error:
            raise InvalidSettings(
                f"{path}:{number} is no labelled sample; write question, response and label (true or false): {error}"
            ) from error
        if isinstance(sample, LabelledSample) and (unknown := sorted(sample.criteria.keys() - names)):
            raise InvalidSettings(
                f"{path}:{number} labels {', '.join(unknown)}, but the criteria are {', '.join(sorted(names))}"
            )
        n_samples += 1
        yield sample
    if not n_samples:
        raise InvalidSettings(f"{path} has no samples; write one JSON object per line")
