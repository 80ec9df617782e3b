"""The engine as generators of SkyRL call it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from skyrl_train.compat.skyrl import engine_client
from skyrl_train.compat.skyrl.absent import CLIENT_METHODS
from skyrl_train.compat.skyrl.engine_client import (
    InferenceEngineClient,
    InferenceEngineInput,
    get_sampling_params_for_backend,
)
from skyrl_train.compat.skyrl.experiment import BasePPOExp
from skyrl_train.compat.skyrl.generator import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl_train.config import load_config
from skyrl_train.entrypoints.main_base import parse_cli
from skyrl_train.errors import DataError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf import PackedEngine, load_engine

MESSAGES = [{"role": "user", "content": "State:"}]


@pytest.fixture
async def engine(tiny_model_path: Path) -> AsyncIterator[PackedEngine]:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_cache_bytes": 1 << 24}
    engine = load_engine(str(tiny_model_path), dtype=torch.float32, **limits)
    yield engine
    await engine.close()


@pytest.fixture
def client(engine: PackedEngine, tiny_tokenizer: PreTrainedTokenizerBase) -> InferenceEngineClient:
    cfg = load_config({"generator": {"sampling_params": {"max_generate_length": 5}}}).generator
    return InferenceEngineClient(engine, tiny_tokenizer, cfg, seed=1)


async def test_conversations_and_token_ids_get_the_same_responses(
    client: InferenceEngineClient, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 4}
    text = tiny_tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    token_ids = tiny_tokenizer(text)["input_ids"]
    of_messages = await client.generate(InferenceEngineInput(prompts=[MESSAGES] * 2, sampling_params=greedy))
    of_tokens = await client.generate(InferenceEngineInput(prompt_token_ids=[token_ids] * 2, sampling_params=greedy))
    assert of_messages["response_ids"] == of_tokens["response_ids"]
    assert of_messages["response_ids"][0] == of_messages["response_ids"][1]
    assert of_messages["responses"][0] == tiny_tokenizer.decode(of_messages["response_ids"][0])
    assert of_messages["stop_reasons"] == ["length"] * 2
    for ours, theirs in zip(of_messages["response_logprobs"], of_tokens["response_logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


async def test_tokens_depend_on_session_number_and_seed(
    engine: PackedEngine, client: InferenceEngineClient, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    async def sample(client: InferenceEngineClient, *sessions: str) -> list[list[int]]:
        inputs = InferenceEngineInput(prompts=[MESSAGES] * len(sessions), session_ids=list(sessions))
        return (await client.generate(inputs))["response_ids"]

    again = InferenceEngineClient(engine, tiny_tokenizer, client._cfg, seed=1)
    other = InferenceEngineClient(engine, tiny_tokenizer, client._cfg, seed=2)
    first, second = await sample(client, "a", "b")
    assert len(first) == 5
    assert [await sample(again, "b"), await sample(again, "a")] == [[second], [first]]
    assert first != second
    assert await sample(client, "a") != [first]
    assert await sample(other, "a") != [first]


async def test_the_session_that_was_idle_for_longest_ends(
    client: InferenceEngineClient, engine: PackedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    end_session = engine.end_session

    async def record(session_id: str) -> None:
        ended.append(session_id)
        await end_session(session_id)

    monkeypatch.setattr(engine, "end_session", record)
    monkeypatch.setattr(engine_client, "MAX_SESSIONS", 2)
    for session in (1, 2, 1, 3):
        await client.generate(InferenceEngineInput(prompts=[MESSAGES], session_ids=[session]))
    assert ended == ["2"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "either prompts or prompt_token_ids"),
        ({"prompts": [MESSAGES], "prompt_token_ids": [[1]]}, "either prompts or prompt_token_ids"),
        ({"prompts": [MESSAGES], "session_ids": ["a", "b"]}, "2 session_ids for 1 prompts"),
        ({"prompts": [MESSAGES], "sampling_params": {"best_of": 2}}, "best_of=2, which no engine here supports"),
    ],
)
async def test_other_input_is_refused(client: InferenceEngineClient, inputs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        await client.generate(inputs)


async def test_everything_else_is_that_of_the_engine(client: InferenceEngineClient, engine: PackedEngine) -> None:
    assert client.info == engine.info
    (result,) = await client.generate([EngineRequest([5, 6], SamplingParams(2), seed=0)])
    assert len(result.token_ids) == 2
    await client.pause()
    await client.resume()


@pytest.mark.parametrize("name", sorted(CLIENT_METHODS))
async def test_what_skyrl_has_and_the_client_lacks_is_explained(client: InferenceEngineClient, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute {name!r}, which SkyRL has; use .* instead"):
        getattr(client, name)


class LengthGenerator(GeneratorInterface):
    """A generator in the form of SkyRL: it calls the engine itself, and rewards the length of a reply."""

    def __init__(self, cfg: Any, client: InferenceEngineClient, tokenizer: PreTrainedTokenizerBase) -> None:
        self.generator_cfg, self.client, self.tokenizer = cfg, client, tokenizer

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        output = await self.client.generate(
            InferenceEngineInput(
                prompts=input_batch["prompts"],
                session_ids=[f"{id.instance_id}_{id.repetition_id}" for id in input_batch["trajectory_ids"]],
                sampling_params=get_sampling_params_for_backend("vllm", self.generator_cfg.sampling_params),
            )
        )
        prompts = self.tokenizer.apply_chat_template(
            input_batch["prompts"], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return {
            "prompt_token_ids": prompts["input_ids"],
            "response_ids": output["response_ids"],
            "rewards": [float(len(response)) for response in output["responses"]],
            "loss_masks": [[1] * len(ids) for ids in output["response_ids"]],
            "stop_reasons": output["stop_reasons"],
            "rollout_metrics": {},
            "rollout_logprobs": output["response_logprobs"],
        }


def test_a_generator_of_skyrl_trains(catch_run: list[str], tmp_path: Path) -> None:
    class Experiment(BasePPOExp):
        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> GeneratorInterface:
            return LengthGenerator(cfg.generator, inference_engine_client, tokenizer)

    overrides = ["generator.sampling_params.max_generate_length=4", "trainer.eval_interval=-1"]
    Experiment(parse_cli([*catch_run, *overrides])).run()
    last = json.loads((tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["reward/avg_raw_reward"] > 1
    assert last["policy/grad_norm"] > 0
    assert last["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
