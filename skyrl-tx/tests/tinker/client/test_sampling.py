"""Sampling with the real client."""

from __future__ import annotations

import itertools
from typing import Any

import tinker
from tinker import types
from tx_client import PROMPT
from tx_server import BASE_MODEL, Running

from tx.tinker.db_models import Kind
from tx.tinker.wire.sample_job import SampleJob


def test_sampling_from_names(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    path = training.save_weights_for_sampler("sampled").result().path
    params = types.SamplingParams(max_tokens=2)
    for options in ({"model_path": path}, {"base_model": BASE_MODEL}):
        sampler = service.create_sampling_client(**options).result()
        assert sampler.sample(PROMPT, 1, params).result().sequences[0].tokens == [0, 0]
        assert sampler.get_base_model() == BASE_MODEL


def test_fifty_samples_at_once(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    asked = [sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=2)) for _ in range(50)]
    found = [one.result() for one in asked]
    ids = list(itertools.chain.from_iterable([s.sequence_id for s in one.sequences] for one in found))
    assert len(set(ids)) == 100


def test_stops(server: Running, service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()

    def job(stop: Any) -> SampleJob:
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1, stop=stop)).result()
        return SampleJob.model_validate_json(server.rows(Kind.SAMPLE)[-1].payload)

    assert (job(None).stop_tokens, job(None).stop_strings) == (None, [])
    assert (job([]).stop_tokens, job([]).stop_strings) == ([], [])
    assert (job([7]).stop_tokens, job([7]).stop_strings) == ([7], [])
    assert (job("x").stop_tokens, job("x").stop_strings) == (None, ["x"])
    asked = job(None).request(eos_ids=[2], max_context=64)
    assert asked.params.stop_tokens == (2,)
