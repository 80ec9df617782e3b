import random
import re

import pytest

from examples.gsm8k.word_problems import KINDS, Kind, Working, divide, word_problems

STEP = re.compile(r"(\d+)([-+*/])(\d+)=<<([^=]+)=(\d+)>>(\d+)")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_step_of_an_answer_is_correct_and_uses_known_numbers(kind: Kind) -> None:
    for seed in range(300):
        work = Working()
        question = kind(random.Random(seed), work)
        assert re.fullmatch(r"[A-Z][^{}]*\?", question), question
        *lines, last = work.answer().split("\n")
        results: list[int] = []
        used: set[int] = set()
        known = {int(number) for number in re.findall(r"\d+", question)} | {2, 4, 100}
        known |= {2, 3, 4} if kind.__name__ == "half_as_many" else set()
        for line in lines:
            (step,) = STEP.finditer(line)
            a, sign, b, expression, annotated, result = step.groups()
            assert expression == f"{a}{sign}{b}"
            assert annotated == result
            assert eval(expression) == int(result)
            assert {int(a), int(b)} <= known | set(results), line
            used |= {int(a), int(b)}
            results.append(int(result))
        assert all(result > 0 for result in results[-1:])
        assert all(result >= 0 for result in results)
        assert last == f"#### {results[-1]}"
        assert set(results[:-1]) <= used


def test_a_division_with_remainder_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="7 / 2 is not whole"):
        divide(7, 2)


def test_problems_are_distinct_and_depend_on_the_seed() -> None:
    problems = word_problems(700, seed=5)
    assert len(problems) == 700
    assert word_problems(700, seed=5) == problems
    assert word_problems(700, seed=6) != problems
    assert list(word_problems(70, seed=5).items()) == list(problems.items())[:70]


def test_every_kind_has_an_equal_share() -> None:
    starts = [re.sub(r"\d+", "N", question) for question in word_problems(14 * 50, seed=0)]
    assert sum("puts a fence around" in start for start in starts) == 50
    assert sum("A bus starts with N people" in start for start in starts) == 50
