import math
import random
import re
from fractions import Fraction

import pytest

from examples.aime.number_problems import (
    KINDS,
    Kind,
    dice_chance,
    divisor_sum,
    largest_unpayable,
    min_with_remainders,
    n_multiples,
    n_paths,
    n_sparse_subsets,
    n_with_digit_sum,
    n_zeros,
    number_problems,
)


def test_known_values() -> None:
    assert n_multiples(12, 2, 3) == 6  # 2 3 4 8 9 10
    assert [divisor_sum(n) for n in (1, 6, 28)] == [1, 12, 56]
    assert [n_zeros(n) for n in (4, 5, 25, 100)] == [0, 1, 6, 24]
    assert n_paths(2, 2, (1, 1)) == 2
    assert n_paths(3, 3, (1, 1)) == math.comb(6, 3) - math.comb(2, 1) * math.comb(4, 2)
    assert [n_sparse_subsets(n) for n in (1, 2, 3, 4, 5)] == [2, 3, 5, 8, 13]
    assert min_with_remainders((3, 5, 7), (2, 3, 2)) == 23
    assert [largest_unpayable(3, 5), largest_unpayable(6, 35)] == [7, 6 * 35 - 6 - 35]
    assert [n_with_digit_sum(20, 2), n_with_digit_sum(99, 18)] == [3, 1]
    assert [dice_chance(1, 6), dice_chance(2, 7), dice_chance(3, 3)] == [
        Fraction(1, 6),
        Fraction(1, 6),
        Fraction(1, 216),
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_questions_are_well_formed_and_answers_are_numbers(kind: Kind) -> None:
    for seed in range(30):
        question, answer = kind(random.Random(seed))
        assert re.fullmatch(r"[A-Z0-9].*\?", question)
        assert question.count("$") % 2 == 0
        assert question.count("{") == question.count("}")
        assert answer >= 0
        assert kind(random.Random(seed)) == (question, answer)


def test_the_remainder_of_a_power_matches_its_question() -> None:
    question, answer = KINDS[0](random.Random(1))
    base, exponent, modulus = map(int, re.findall(r"\d+", question))
    assert answer == base**exponent % modulus


def test_problems_are_distinct_and_depend_on_the_seed() -> None:
    problems = number_problems(60, seed=1)
    assert len(problems) == 60
    assert number_problems(60, seed=1) == problems
    assert number_problems(60, seed=2) != problems
