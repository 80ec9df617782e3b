"""Training with the real client: what it sends, and what it makes of the replies."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tx_client import ADAM, PROMPT, datum, weighted
from tx_server import BASE_MODEL, Running, serving

from tx.tinker.db_models import Kind
from tx.tinker.http_body import BodyLimit
from tx.tinker.wire import codec
from tx.tinker.wire.requests import CreateModelRequest, OptimStepRequest


def test_training_and_sampling(server: Running, service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    assert re.fullmatch(r"[0-9a-f-]{36}:train:0", training.model_id)
    info = training.get_info()
    assert (info.model_data.model_name, info.model_data.tokenizer_id) == (BASE_MODEL, BASE_MODEL)
    assert (info.is_lora, info.lora_rank) == (True, 4)
    output = training.forward_backward([weighted(), weighted()], "cross_entropy").result()
    assert output.metrics == {"loss:sum": 12.0}
    assert output.loss_fn_outputs[1]["logprobs"].tolist() == [-1, -2, -3]
    assert output.loss_fn_outputs[1]["elementwise_loss"].tolist() == [1, 2, 3]
    assert training.optim_step(ADAM).result().metrics == {"skyrl.ai/grad_norm": 1.0}
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=3, seed=1, stop=["x"])
    sampled = sampler.sample(PROMPT, num_samples=2, sampling_params=params, include_prompt_logprobs=True).result()
    assert [sequence.tokens for sequence in sampled.sequences] == [[0, 0, 0], [1, 1, 1]]
    assert len({sequence.sequence_id for sequence in sampled.sequences}) == 2
    assert sampled.prompt_logprobs == [None, -1, -1]
    assert sampler.compute_logprobs(PROMPT).result() == [None, -1, -1]


def test_what_the_engine_is_told(server: Running, training: tinker.TrainingClient) -> None:
    training.optim_step(ADAM).result()
    created = CreateModelRequest.model_validate_json(server.rows(Kind.CREATE_MODEL)[-1].payload)
    assert created.model_id == training.model_id
    assert created.lora_config is not None
    assert created.lora_config.seed is not None
    step = OptimStepRequest.model_validate_json(server.rows(Kind.OPTIM_STEP)[-1].payload).adam()
    assert (step.learning_rate, step.beta2, step.eps, step.grad_clip_norm) == (1e-3, 0.95, 1e-12, 1.0)


def test_forward_only_is_told(server: Running, training: tinker.TrainingClient) -> None:
    training.forward([weighted()], "cross_entropy").result()
    training.forward_backward([weighted()], "cross_entropy").result()
    passes = [one for one in server.rows(Kind.FORWARD_BACKWARD) if one.model_id == training.model_id]
    assert [codec.message_from_bytes(one.payload).forward_only for one in passes] == [True, False]


def test_custom_losses(server: Running, training: tinker.TrainingClient) -> None:
    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum(one.sum() * 3 for one in logprobs), {"mine:mean": 4.0}  # type: ignore[return-value]

    output = training.forward_backward_custom([datum(), datum(5)], loss).result()
    assert output.metrics["loss:sum"] == 3 * (6 + 15)
    assert output.metrics["mine:mean"] == 4.0


def test_losses_of_reinforcement_learning(training: tinker.TrainingClient) -> None:
    policy = {"logprobs": np.float32([-1, -1, 0]), "advantages": np.float32([1, -1, 0])}
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        assert training.forward_backward([datum(**policy)], name).result().metrics  # type: ignore[arg-type]
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    training.forward_backward([datum(**policy)], "ppo", config).result()  # type: ignore[arg-type]


def test_many_chunks_arrive_once_each(server: Running, training: tinker.TrainingClient) -> None:
    output = training.forward_backward([weighted()] * 2500, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2500
    assert output.metrics["loss:sum"] == 2500 * 6
    passes = [one for one in server.rows(Kind.FORWARD_BACKWARD) if one.model_id == training.model_id]
    assert sorted(one.seq_id for one in passes if one.seq_id) == [1, 2, 3]


def test_passes_are_compressed_where_the_server_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encodings: list[str] = []
    unpack = BodyLimit._unpack

    def noting(limit: BodyLimit, body: bytes, encoding: str) -> bytes:
        encodings.append(encoding)
        return unpack(limit, body, encoding)

    monkeypatch.setattr(BodyLimit, "_unpack", noting)
    with serving(tmp_path, compress_passes=True) as running:
        client = running.sdk()
        training = client.create_lora_training_client(BASE_MODEL, rank=4).result()
        assert training.forward([weighted()] * 100, "cross_entropy").result().metrics == {"loss:sum": 600.0}
        client.close(status="success")
    assert encodings == ["zstd"]
