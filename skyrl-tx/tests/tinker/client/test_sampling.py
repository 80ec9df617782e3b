"""Conversion of users' sample requests."""

from __future__ import annotations

from typing import Any

import tinker
from tinker import types
from tx_client import PROMPT
from tx_server import BASE_MODEL, Running

from tx.tinker.db_models import Kind
from tx.tinker.wire.sample_job import SampleJob


def test_stops(server: Running, service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()

    def job(stop: Any) -> SampleJob:
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1, stop=stop)).result()
        return SampleJob.model_validate_json(server.rows(Kind.SAMPLE)[-1].payload)

    assert (job(None).stop_tokens, job(None).stop_strings) == (None, [])
    assert (job([]).stop_tokens, job([]).stop_strings) == ([], [])
    assert (job([7]).stop_tokens, job([7]).stop_strings) == ([7], [])
    assert (job("x").stop_tokens, job("x").stop_strings) == (None, ["x"])
    request = job(None).request(owner="", eos_ids=[2], max_context=64)
    assert request.params.stop_tokens == (2,)
