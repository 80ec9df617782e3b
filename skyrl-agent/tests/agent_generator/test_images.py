"""Images in the rows of agents."""

from pathlib import Path

import pytest
from agent_kit.agents import SAMPLING, ask_once
from train_kit.engines import LIMITS
from train_kit.messages import user
from train_kit.models import load_on_cpu
from train_kit.vision_models import draw
from transformers import PreTrainedTokenizerBase

from skyrl_agent.agent_generator import AgentGenerator
from skyrl_gym.images import read_image
from skyrl_train.config import load_config
from skyrl_train.generators.base import BatchMetadata, rollout_requests
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.hf.general import GeneralEngine
from skyrl_train.types import DrawnPrompt, PromptRow


@pytest.mark.parametrize("in_own_process", [False, True])
async def test_an_agent_sends_the_images_of_its_row(
    in_own_process: bool, vision_model_path: Path, vision_tokenizer: PreTrainedTokenizerBase, forked_processes: None
) -> None:
    """The prompt of its row is in the form of OpenAI's client."""
    cfg = load_config({"generator": {"n_rollout_retries": 0}}).generator
    engine = GeneralEngine(load_on_cpu(vision_model_path), vision_tokenizer, **LIMITS)
    generator = AgentGenerator(ask_once, cfg, engine, vision_tokenizer, in_own_process=in_own_process)
    red = read_image(draw("red"))
    row = PromptRow("0", [user([{"type": "image", "image": red}, {"type": "text", "text": "Where?"}])], None, {})
    requests = rollout_requests([DrawnPrompt(0, row, 0)], 1, "agent")
    (trajectory,) = await generator.rollout(requests, SAMPLING, BatchMetadata(1, "train"))
    await generator.close()
    await engine.close()
    assert trajectory.error is None
    (segment,) = trajectory.segments
    assert [span.image for span in segment.images] == [red]
    assert segment.prompt_ids == ChatEncoder(vision_tokenizer).prompt_ids(row.prompt)
