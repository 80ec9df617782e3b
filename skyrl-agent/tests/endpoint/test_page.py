"""The examples of docs/guides/endpoint.md work, and the names it mentions exist."""

import re
from pathlib import Path
from typing import Any

from agent_kit.endpoints import HELLO, new_client
from train_kit.engines import RecordedEngine
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_agent.endpoint.wire import NOT_OFFERED
from skyrl_train.inference_engines.base import SamplingParams

PAGE = (Path(__file__).parents[3] / "docs/guides/endpoint.md").read_text(encoding="utf-8")


async def test_the_server_of_the_page_records(talker: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    engine = RecordedEngine(talker, tiny_tokenizer)

    async def use(base_url: str) -> None:
        async with new_client(base_url) as client:
            await client.chat.completions.create(model="policy", messages=HELLO)

    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1], names)
    recording = await names["serve"](engine, tiny_tokenizer, SamplingParams(max_new_tokens=4), use)
    assert len(recording.turns) == 1
    await engine.close()


def test_all_refused_fields_are_listed() -> None:
    (listed,) = re.findall(r"would change the answer\s+get status 400:\n\n(.*?)\n\n", PAGE, re.DOTALL)
    names = re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", listed, flags=re.DOTALL))  # without values in parentheses
    assert sorted(names) == sorted(NOT_OFFERED)
