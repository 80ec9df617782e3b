import pickle
from typing import Any

import numpy as np
import pytest
import tinker
from differences import client_of, takes
from passes import Server, logprobs_of, step
from tinker import types

PROMPT = types.ModelInput.from_ints([9, 8, 7, 6, 5])
N_TOKENS = 8


def sample_tokens(sampler: tinker.SamplingClient, n_samples: int = 1, **params: Any) -> list[list[int]]:
    settings = types.SamplingParams(**{"max_tokens": N_TOKENS, "stop": [], **params})
    return [one.tokens for one in sampler.sample(PROMPT, n_samples, settings).result().sequences]


@pytest.fixture
def base(server: Server, service: tinker.ServiceClient) -> tinker.SamplingClient:
    return client_of(service.create_sampling_client(base_model=server.base_model))


def full_input(datum: types.Datum) -> types.ModelInput:
    """Return the tokens of a datum, including its last target."""
    last = datum.loss_fn_inputs["target_tokens"].tolist()[-1]
    return types.ModelInput.from_ints([*datum.model_input.to_ints(), last])


def test_what_a_sampler_and_training_say(server: Server, training: tinker.TrainingClient) -> None:
    """Log-probs of a sampler match those of a training pass, before and after a step."""
    for _ in range(2):
        sampler = client_of(training.save_weights_and_get_sampling_client())
        found = sampler.compute_logprobs(full_input(server.data[0])).result()
        assert found[0] is None
        np.testing.assert_allclose(found[1:], logprobs_of(training, server.data[:1])[0], atol=1e-5)
        step(training, [server.data])


def test_greedy(base: tinker.SamplingClient) -> None:
    """At temperature 0, and with top_k=1, samples are greedy."""
    params = types.SamplingParams(max_tokens=N_TOKENS, temperature=0, stop=[])
    result = base.sample(PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    (sequence,) = result.sequences
    assert sample_tokens(base, 2, temperature=0) == [sequence.tokens] * 2
    assert sample_tokens(base, 2, top_k=1, seed=5) == [sequence.tokens] * 2
    again = types.ModelInput.from_ints([*PROMPT.to_ints(), *sequence.tokens])
    found = base.sample(again, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    best = found.topk_prompt_logprobs[PROMPT.length :]
    assert [row[0][0] for row in best] == sequence.tokens
    np.testing.assert_allclose(found.prompt_logprobs[PROMPT.length :], sequence.logprobs, atol=1e-4)


def test_ends(base: tinker.SamplingClient) -> None:
    """A sample ends at max_tokens, or with a stop token or string, which it includes."""
    (tokens,) = sample_tokens(base, seed=21)
    assert len(tokens) == N_TOKENS
    assert sample_tokens(base, seed=21, max_tokens=3) == [tokens[:3]]
    stop = tokens[4]
    end = tokens.index(stop) + 1
    params = types.SamplingParams(max_tokens=N_TOKENS, seed=21, stop=[stop])
    (stopped,) = base.sample(PROMPT, 1, params).result().sequences
    assert (stopped.tokens, stopped.stop_reason) == (tokens[:end], "stop")
    text = base.get_tokenizer().decode([stop])
    params = types.SamplingParams(max_tokens=N_TOKENS, seed=21, stop=text)
    (stopped,) = base.sample(PROMPT, 1, params).result().sequences
    assert stopped.stop_reason == "stop"
    assert text in base.get_tokenizer().decode(stopped.tokens)
    assert text not in base.get_tokenizer().decode(stopped.tokens[:-1])
    (full_input,) = base.sample(PROMPT, 1, types.SamplingParams(max_tokens=3, seed=21)).result().sequences
    assert (len(full_input.tokens), full_input.stop_reason) == (3, "length")


def test_tokenizer(server: Server, training: tinker.TrainingClient, base: tinker.SamplingClient) -> None:
    """The client finds the tokenizer."""
    text = "Hello, world: 1 + 1 = 2"
    sampler = client_of(training.save_weights_and_get_sampling_client())
    encoded = [one.get_tokenizer().encode(text) for one in (training, base, sampler)]
    assert encoded[0] == encoded[1] == encoded[2]
    assert base.get_tokenizer().decode(encoded[0]) == text
    assert base.get_base_model() == sampler.get_base_model() == server.base_model


@takes(tinker.SamplingClient.sample, "topk_sample_logprobs")
def test_likeliest(base: tinker.SamplingClient) -> None:
    """The most likely tokens at each position of a sample are reported."""
    params = types.SamplingParams(max_tokens=N_TOKENS, temperature=0, stop=[])
    (sequence,) = base.sample(PROMPT, 1, params, topk_sample_logprobs=3).result().sequences
    assert [[len(row), row[0][0]] for row in sequence.topk_logprobs] == [[3, token] for token in sequence.tokens]
    np.testing.assert_allclose([row[0][1] for row in sequence.topk_logprobs], sequence.logprobs, atol=1e-5)


def test_pickled(training: tinker.TrainingClient) -> None:
    """A pickled sampler samples the same."""
    sampler = client_of(training.save_weights_and_get_sampling_client())
    assert sample_tokens(pickle.loads(pickle.dumps(sampler)), 2, seed=5) == sample_tokens(sampler, 2, seed=5)
