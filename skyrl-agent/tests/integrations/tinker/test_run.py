from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from train_kit.datasets import write_jsonl, write_prompts
from train_kit.runs import Run
from train_kit.tinker import serving_tinker
from train_kit.vision_models import ask, picture
from transformers import PreTrainedTokenizerBase

from skyrl_agent.integrations.tinker.options import TinkerOptions
from skyrl_agent.integrations.tinker.run import TinkerRun
from skyrl_gym.images import to_openai
from skyrl_train.compat.skyrl.generator import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl_train.dataset.rows import LocatedRow
from skyrl_train.errors import DataError
from skyrl_train.generators.base import request_seed
from skyrl_train.inference_engines.base import EngineRequest, InferenceEngine, SamplingParams
from skyrl_train.types import Trajectory
from tx.tinker.db_models import Kind
from tx.tinker.wire import tinker_pb2 as pb

ENV = "train_kit.vision_models:PictureEnv"


class OddGenerator(GeneratorInterface):
    """A generator that uses only the public interface and rewards every second sample of a prompt."""

    def __init__(self, engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self.is_closed = False

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        ids, sampling = input_batch["trajectory_ids"], SamplingParams(max_new_tokens=4)
        prompts = [self._tokenizer.encode(prompt[0]["content"]) for prompt in input_batch["prompts"]]
        results = await self._engine.generate(
            [EngineRequest(p, sampling, request_seed(0, id, 0)) for p, id in zip(prompts, ids, strict=True)]
        )
        return GeneratorOutput(
            prompt_token_ids=prompts,
            response_ids=[result.token_ids for result in results],
            rewards=[float(id.repetition_id % 2) for id in ids],
            loss_masks=[[1] * len(result.token_ids) for result in results],
            stop_reasons=[result.stop_reason for result in results],
            rollout_logprobs=[result.logprobs or [] for result in results],
            rollout_metrics={"generate/n_agents": float(len(ids))},
        )

    async def close(self) -> None:
        self.is_closed = True


class OddRun(TinkerRun):
    """A run that overrides each method that a subclass may."""

    def get_generator(self, engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase) -> GeneratorInterface:
        self.generator = OddGenerator(engine, tokenizer)
        self.alerts: list[tuple[int, bool]] = []  # the step, and whether its metrics are of an evaluation
        return self.generator

    def check_rows(self, rows: Iterable[LocatedRow]) -> None:
        for location, row in rows:
            if row.env_class != "agent":
                raise DataError(f"{location} is for {row.env_class}")

    def step_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        return super().step_metrics(trajectories) | {"rollouts/played": float(len(trajectories))}

    async def alert(self, step: int, metrics: dict[str, float]) -> None:
        self.alerts.append((step, "eval/all/avg_score" in metrics))


def test_a_run_plays_with_the_generator_of_its_subclass(tiny_model_path: Path, tmp_path: Path) -> None:
    options = TinkerOptions(
        train_data=str(write_prompts(tmp_path / "train.jsonl", 4, "agent")),
        eval_data=str(write_prompts(tmp_path / "eval.jsonl", 4, "agent")),
        model_name=str(tiny_model_path),
        batch_size=2,
        n_samples_per_prompt=2,
        max_input_length=64,
        max_generate_length=4,
        max_sequence_length=68,
        max_steps=2,
        output_dir=str(tmp_path),
        logger="jsonl",
    )
    run = OddRun(options)
    with serving_tinker(tmp_path / "state", tiny_model_path):
        run.run()
    steps = [row for row in Run(run.run_folder.path).metrics if "rollouts/played" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert (row["reward/avg_raw_reward"], row["rollouts/played"], row["generate/n_agents"]) == (0.5, 4, 4)
        assert row["advantage/std"] == pytest.approx(0.5**0.5, rel=1e-4)  # of 1/√2 and -1/√2
    assert run.alerts == [(0, True), (1, False), (2, False), (2, True)]
    assert run.generator.is_closed


def test_a_run_refuses_rows_before_it_connects(tiny_model_path: Path, tmp_path: Path) -> None:
    path = str(write_prompts(tmp_path / "train.jsonl", 4, "other"))
    options = TinkerOptions(train_data=path, model_name=str(tiny_model_path), output_dir=str(tmp_path), batch_size=2)
    with pytest.raises(DataError, match=r"row 0 of .*train.jsonl is for other"):
        OddRun(options).run()
    with pytest.raises(DataError, match="other"):  # no such environment
        TinkerRun(options).run()


def test_a_run_with_images(vision_model_path: Path, tmp_path: Path) -> None:
    """Rows, observations and replies: the server scores sampled tokens as it has sampled them."""
    data = tmp_path / "rows.jsonl"
    write_jsonl(
        data,
        [
            {"prompt": to_openai(ask(picture(i), "Look.")), "env_class": ENV, "extra_info": {"seed": i}}
            for i in range(2)
        ],
    )
    options = TinkerOptions(
        train_data=str(data),
        model_name=str(vision_model_path),
        batch_size=2,
        n_samples_per_prompt=3,
        max_turns=3,
        max_input_length=400,
        max_generate_length=6,
        max_sequence_length=410,
        max_steps=2,
        learning_rate=1e-2,
        output_dir=str(tmp_path),
        logger="jsonl",
    )
    run = TinkerRun(options)
    with serving_tinker(tmp_path / "state", vision_model_path) as server:
        run.run()
        passes = server.rows(Kind.FORWARD_BACKWARD)
    steps = [row["step"] for row in Run(run.run_folder.path).metrics if "reward/avg_raw_reward" in row]
    assert steps == [1, 2]
    assert len(passes) == 2
    for request in passes:
        assert request.result is not None
        message = pb.ForwardBackwardRequest.FromString(request.payload)
        outputs = pb.ForwardBackwardOutput.FromString(request.result).loss_fn_outputs[0]
        scored = np.frombuffer(outputs.fields["logprobs"].data, "<f4")
        sampled, advantages = (
            np.concatenate([np.frombuffer(datum.loss_fn_inputs[name].dense, "<f4") for datum in message.data])
            for name in ("logprobs", "advantages")
        )
        np.testing.assert_allclose(scored[advantages != 0], sampled[advantages != 0], atol=2e-5)
        n_images = [sum(chunk.HasField("image") for chunk in datum.model_input) for datum in message.data]
        assert set(n_images) == {4}  # in the row, and before each of the three replies
