"""Conversion of users' training requests."""

from __future__ import annotations

import tinker
from tx_client import ADAM, weighted_datum
from tx_kit.servers import Running

from tx.tinker.db_models import Kind
from tx.tinker.wire import codec
from tx.tinker.wire.requests import CreateModelRequest, OptimStepRequest


def test_the_engine_gets_the_users_settings(server: Running, training: tinker.TrainingClient) -> None:
    training.optim_step(ADAM).result()
    created = CreateModelRequest.model_validate_json(server.rows(Kind.CREATE_MODEL)[-1].payload)
    assert created.model_id == training.model_id
    assert created.lora_config is not None
    assert created.lora_config.seed is not None
    step = OptimStepRequest.model_validate_json(server.rows(Kind.OPTIM_STEP)[-1].payload).adam()
    assert (step.learning_rate, step.beta2, step.eps, step.grad_clip_norm) == (1e-3, 0.95, 1e-12, 1.0)


def test_the_engine_gets_forward_only(server: Running, training: tinker.TrainingClient) -> None:
    training.forward([weighted_datum()], "cross_entropy").result()
    training.forward_backward([weighted_datum()], "cross_entropy").result()
    passes = [one for one in server.rows(Kind.FORWARD_BACKWARD) if one.model_id == training.model_id]
    assert [codec.message_from_bytes(one.payload).forward_only for one in passes] == [True, False]


def test_many_chunks_arrive_once_each(server: Running, training: tinker.TrainingClient) -> None:
    output = training.forward_backward([weighted_datum()] * 2500, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2500
    assert output.metrics["loss:sum"] == 2500 * 6
    passes = [one for one in server.rows(Kind.FORWARD_BACKWARD) if one.model_id == training.model_id]
    assert sorted(one.seq_id for one in passes if one.seq_id) == [1, 2, 3]
