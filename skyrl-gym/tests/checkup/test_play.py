import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from gym_kit.environments import ROW
from PIL import Image

from skyrl_gym.checkup.play import play
from skyrl_gym.envs import BUILT_IN
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import EnvSpec


class AsyncEnv(BaseTextEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.reward = env_config.inner.reward

    async def init_async(self, prompt: Any) -> Any:
        self.loop = asyncio.get_running_loop()
        return prompt, {}

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        assert asyncio.get_running_loop() is self.loop
        return BaseTextEnvStepOutput(observations=[], reward=self.reward, done=True, metadata={})


SPEC = EnvSpec("gsm8k_multi_turn", BUILT_IN["gsm8k_multi_turn"])


def test_episode_is_played_by_hand() -> None:
    screen = io.StringIO()
    total = play(SPEC, ROW, {}, io.StringIO("#### 41\n.\nLet me see.\n#### 42\n.\n"), screen)
    assert total == 1.0
    shown = screen.getvalue()
    assert shown.startswith("\n[user]\n6 * 7?\n")
    assert "-- reward 1.0" in shown
    assert "Episode finished: reward 1.0" in shown
    assert play(SPEC, ROW, {}, io.StringIO(""), io.StringIO()) is None
    assert play(SPEC, ROW, {}, io.StringIO("#### 42"), io.StringIO()) == 1.0  # the last full stop may be missing


def test_coroutines_share_an_event_loop_and_sections_have_attributes() -> None:
    spec = EnvSpec("async", AsyncEnv)
    assert play(spec, {}, {"inner": {"reward": 3}}, io.StringIO("go\n.\n"), io.StringIO()) == 3.0


class DrawingEnv(BaseTextEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        assert extras["reads_images"]

    def init(self, prompt: Any) -> Any:
        parts = [{"type": "image", "image": Image.new("RGB", (8, 4), color)} for color in ("red", "blue")]
        return [{"role": "user", "content": [{"type": "text", "text": "Look: "}, *parts]}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={})


def test_images_are_written_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    screen = io.StringIO()
    play(EnvSpec("drawing", DrawingEnv), {}, {}, io.StringIO("go"), screen)
    first, second = sorted(tmp_path.glob("skyrl-play-*/*.png"))
    assert f"Look: [8 x 4: {first}][8 x 4: {second}]\n" in screen.getvalue()
    assert Image.open(second).getpixel((0, 0)) == (0, 0, 255)
