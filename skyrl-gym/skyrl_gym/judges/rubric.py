"""Criteria of a judge, and the score of its verdicts."""

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Verdict = bool | int
"""The verdict on a criterion: yes or no, or a grade from 0 to the criterion's `scale`."""


class Criterion(BaseModel):
    """One thing to judge, e.g. ``Criterion(name="polite", text="The response is polite.", weight=2)``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z_ -]*$")]
    """Name in the verdict and in metrics."""
    text: Annotated[str, Field(min_length=1)]
    """Claim that the judge confirms or grades."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share in the score, relative to the other criteria."""
    reference: str | None = None
    """Text to compare with, for all responses, e.g. a style guide."""
    scale: Annotated[int, Field(ge=1)] | None = None
    """Best grade. Without it, the verdict is yes or no."""

    @property
    def choices(self) -> str:
        """The possible verdicts, as shown to the judge."""
        return "yes or no" if self.scale is None else f"0 to {self.scale}"


class Rubric(BaseModel):
    """Weighted criteria. The score is the weighted mean of the verdicts, each scaled to [0, 1].

    >>> rubric = Rubric(criteria=[Criterion(name="a", text="A"), Criterion(name="b", text="B", weight=3, scale=4)])
    >>> rubric.score({"a": True, "b": 2}), rubric.score({"a": True, "b": None})
    (0.625, None)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    criteria: Annotated[tuple[Criterion, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [criterion.name.casefold() for criterion in self.criteria]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several criteria are called {', '.join(repeated)}; give each its own name")
        return self

    def score(self, verdicts: Mapping[str, Verdict | None]) -> float | None:
        """Return the score in [0, 1], or None if a verdict is unknown."""
        total = 0.0
        for criterion in self.criteria:
            verdict = verdicts.get(criterion.name)
            if verdict is None:
                return None
            total += criterion.weight * verdict / (criterion.scale or 1)
        return total / sum(criterion.weight for criterion in self.criteria)


CORRECTNESS = Rubric(
    criteria=(
        Criterion(
            name="correct",
            text="The response answers the question as the correct answer does. Different words, units and formats are "
            "fine as long as the meaning is the same. Missing parts, other values and several different answers are "
            "not.",
        ),
    )
)
"""The rubric of a judge that compares a response with the correct answer."""
