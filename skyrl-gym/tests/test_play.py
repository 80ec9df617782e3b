from __future__ import annotations

import io

import pytest

from skyrl_gym.envs import BUILT_IN
from skyrl_gym.envs.registration import EnvSpec
from skyrl_gym.play import play

ROW = {"prompt": [{"role": "user", "content": "6 * 7?"}], "reward_spec": {"ground_truth": "42"}, "max_turns": 3}
SPEC = EnvSpec("gsm8k_multi_turn", BUILT_IN["gsm8k_multi_turn"])


def test_a_game_by_hand() -> None:
    screen = io.StringIO()
    total = play(SPEC, ROW, {}, io.StringIO("#### 41\n.\nLet me see.\n#### 42\n.\n"), screen)
    assert total == pytest.approx(1.0 + 0.2 / 3)
    shown = screen.getvalue()
    assert shown.startswith("\n[user]\n6 * 7?\n")
    assert "-- reward 1.0" in shown
    assert "The episode is over: 1.06" in shown


def test_one_may_leave() -> None:
    assert play(SPEC, ROW, {}, io.StringIO(""), io.StringIO()) is None


def test_the_last_reply_may_lack_its_end() -> None:
    assert play(SPEC, ROW, {}, io.StringIO("#### 42"), io.StringIO()) == 1.0
