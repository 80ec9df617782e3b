from __future__ import annotations

import random

import numpy as np
import pytest

from skyrl_gym.adapters.own_random import OwnRandom


def test_an_episode_draws_from_its_own_sequence() -> None:
    own, other = OwnRandom(7), OwnRandom(8)
    drawn, drawn_by_numpy = [], []
    for _ in range(5):
        with own.lent():
            drawn.append(random.random())
            drawn_by_numpy.append(np.random.rand())
        with other.lent():
            random.random()
    alone, alone_by_numpy = random.Random(7), np.random.RandomState(7)
    assert drawn == [alone.random() for _ in range(5)]
    assert drawn_by_numpy == [alone_by_numpy.rand() for _ in range(5)]


def fail_with_the_generators() -> None:
    with OwnRandom(2).lent():
        random.seed(5)
        np.random.rand()
        raise ZeroDivisionError


def test_the_global_sequence_goes_on_where_it_was() -> None:
    def draw() -> tuple[float, float]:
        return random.random(), np.random.rand()

    random.seed(1)
    np.random.seed(1)
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    first = draw()
    with pytest.raises(ZeroDivisionError):
        fail_with_the_generators()
    assert [first, draw()] == expected


def test_without_a_seed_episodes_differ() -> None:
    def first() -> float:
        with OwnRandom(None).lent():
            return random.random()

    assert first() != first()
    with OwnRandom(2**40).lent():  # more than numpy takes
        pass
