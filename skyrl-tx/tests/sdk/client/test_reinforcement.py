"""A reinforcement learning loop: sample, score, train, repeat."""

import numpy as np
import tinker
from differences import client_of
from passes import datum_of
from tinker import types

PROMPT = [9, 8, 7, 6, 5]
N_TOKENS, N_SAMPLES, N_STEPS = 4, 64, 10


def reward(tokens: list[int]) -> float:
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def datum(sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Return a sample as training data; its prompt has advantage 0."""
    tokens = [*PROMPT, *sequence.tokens]
    zeros = [0.0] * (len(PROMPT) - 1)
    advantages = [*zeros, *[advantage] * len(sequence.tokens)]
    return datum_of(tokens[:-1], tokens[1:], logprobs=[*zeros, *sequence.logprobs], advantages=advantages)


def test_reward_rises(training: tinker.TrainingClient) -> None:
    """The mean reward rises from 0.5 to more than 0.8 in ten steps."""
    adam = types.AdamParams(learning_rate=0.02)
    means = []
    for number in range(N_STEPS):
        sampler = client_of(training.save_weights_and_get_sampling_client())
        params = types.SamplingParams(max_tokens=N_TOKENS, stop=[], seed=1000 * number)
        sequences = sampler.sample(types.ModelInput.from_ints(PROMPT), N_SAMPLES, params).result().sequences
        rewards = np.array([reward(one.tokens) for one in sequences])
        means.append(rewards.mean())
        advantages = rewards - rewards.mean()
        data = [datum(one, advantage) for one, advantage in zip(sequences, advantages, strict=True)]
        passed, stepped = training.forward_backward(data, "importance_sampling"), training.optim_step(adam)
        passed.result()
        stepped.result()
    assert means[0] < 0.6, means
    assert min(means[-3:]) > 0.8, means
