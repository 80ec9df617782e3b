"""The examples of docs/guides/endpoint.md work, and the names it mentions exist."""

import re
from pathlib import Path
from typing import Any

import pytest
from train_kit.endpoints import HELLO, new_client
from train_kit.engines import RecordedEngine
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.config import load_config
from skyrl_train.endpoint.wire import NOT_OFFERED
from skyrl_train.generators.base import BatchMetadata, rollout_requests
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import DrawnPrompt, PromptRow

PAGE = (Path(__file__).parents[4] / "docs/guides/endpoint.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run_code(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    return names


@pytest.mark.usefixtures("forked_processes")
async def test_the_agent_of_the_page_plays(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    names = run_code(CODE[0])
    cfg = load_config({"generator": {"n_rollout_retries": 0}})
    engine = RecordedEngine(talker, tiny_tokenizer)
    experiment = object.__new__(names["Experiment"])
    generator = experiment.get_generator(cfg, tiny_tokenizer, engine)
    row = PromptRow("0", HELLO, None, {"reward_spec": {"ground_truth": ""}})
    requests = rollout_requests([DrawnPrompt(0, row, 0)], 2, "maths")
    trajectories = await generator.rollout(requests, SamplingParams(max_new_tokens=4), BatchMetadata(1, "train"))
    assert [(t.is_valid, t.total_reward) for t in trajectories] == [(True, 1.0)] * 2
    assert [[len(segment.turns) for segment in t.segments] for t in trajectories] == [[2]] * 2
    await generator.close()
    await engine.close()


async def test_the_server_of_the_page_records(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    engine = RecordedEngine(talker, tiny_tokenizer)

    async def use(base_url: str) -> None:
        async with new_client(base_url) as client:
            await client.chat.completions.create(model="policy", messages=HELLO)

    recording = await run_code(CODE[-1])["serve"](engine, tiny_tokenizer, SamplingParams(max_new_tokens=4), use)
    assert len(recording.turns) == 1
    await engine.close()


def test_all_refused_fields_are_listed() -> None:
    (listed,) = re.findall(r"would change the answer\s+get status 400:\n\n(.*?)\n\n", PAGE, re.DOTALL)
    names = re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", listed, flags=re.DOTALL))  # without values in parentheses
    assert sorted(names) == sorted(NOT_OFFERED)
