import random

import numpy as np
import pytest

from skyrl_gym.adapters.isolated_random import IsolatedRandom


def test_episode_has_a_separate_random_sequence() -> None:
    own, other = IsolatedRandom(7), IsolatedRandom(8)
    drawn, drawn_by_numpy = [], []
    for _ in range(5):
        with own.activate():
            drawn.append(random.random())
            drawn_by_numpy.append(np.random.rand())
        with other.activate():
            random.random()
    alone, alone_by_numpy = random.Random(7), np.random.RandomState(7)
    assert drawn == [alone.random() for _ in range(5)]
    assert drawn_by_numpy == [alone_by_numpy.rand() for _ in range(5)]


def fail_with_the_generators() -> None:
    with IsolatedRandom(2).activate():
        random.seed(5)
        np.random.rand()
        raise ZeroDivisionError


def test_global_sequence_is_restored() -> None:
    before = random.getstate(), str(np.random.get_state())
    with pytest.raises(ZeroDivisionError):
        fail_with_the_generators()
    assert (random.getstate(), str(np.random.get_state())) == before


def test_without_a_seed_episodes_differ() -> None:
    def first() -> float:
        with IsolatedRandom(None).activate():
            return random.random()

    assert first() != first()
    with IsolatedRandom(2**40).activate():  # larger than numpy's maximum seed
        pass
