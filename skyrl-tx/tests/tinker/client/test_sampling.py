"""Conversion of users' sample requests."""

from __future__ import annotations

from typing import Any

import pytest
import tinker
from tinker import types
from tx_client import PROMPT
from tx_kit.servers import BASE_MODEL, Running

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


def test_a_checkpoint_may_be_given_with_its_base_model(
    server: Running, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    """Recipes name both for a teacher; other base models are refused."""
    path = training.save_state("teacher").result().path
    sampler = service.create_sampling_client(model_path=path, base_model=BASE_MODEL).result()
    sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result()
    job = SampleJob.model_validate_json(server.rows(Kind.SAMPLE)[-1].payload)
    assert job.weights.model_path == path
    with pytest.raises(tinker.BadRequestError, match="'other/model' is not served here"):
        service.create_sampling_client(model_path=path, base_model="other/model").result()


def test_inputs_that_the_loss_does_not_read_are_accepted(training: tinker.TrainingClient) -> None:
    """A recipe of self-distillation leaves `mask` in the data of importance sampling."""
    inputs = {"target_tokens": [2, 3], "logprobs": [-1.0, -1.0], "advantages": [0.0, 1.0]}
    inputs["mask"] = types.TensorData(data=[0.0, 1.0], dtype="float32", shape=[2])
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    assert len(training.forward_backward([datum], "importance_sampling").result().loss_fn_outputs) == 1
