from typing import Any

import gymnasium
import numpy as np
import pytest
from gym_kit.messages import message_text
from gymnasium import spaces
from omegaconf import OmegaConf

import skyrl_gym
from skyrl_gym.adapters.gymnasium import ACTION_NAMES, GymnasiumEnv

PROMPT = [{"role": "system", "content": "You play."}, {"role": "user", "content": "Reach the goal."}]
LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}


class Recorder(gymnasium.Env[Any, Any]):
    """Records actions, and is done after `n_steps` steps."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012, as in Gymnasium
    last: "Recorder | None" = None

    def __init__(self, action_space: Any, n_steps: int = 100, render_mode: str | None = None) -> None:
        self.action_space = action_space
        self.observation_space = spaces.Text(1000)
        self.n_steps = n_steps
        self.actions: list[Any] = []
        self.n_closed = 0
        type(self).last = self

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return f"seed {seed}, options {options}", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.actions.append(action)
        return f"you did {action}", 0.25, False, len(self.actions) >= self.n_steps, {}

    def close(self) -> None:
        self.n_closed += 1


@pytest.fixture(autouse=True)
def recorder() -> Any:
    gymnasium.register(id="Recorder-v0", entry_point=Recorder)
    yield
    del gymnasium.registry["Recorder-v0"]


def last_action(env: GymnasiumEnv) -> Any:
    return env._env.unwrapped.actions[-1]  # type: ignore[union-attr]


def start_env(env_config: dict[str, Any], **extras: Any) -> GymnasiumEnv:
    env = GymnasiumEnv(env_config, extras)
    env.init(PROMPT)
    return env


def make_recording_env(space: Any, **env_config: Any) -> GymnasiumEnv:
    return start_env({"id": "Recorder-v0", "kwargs": {"action_space": space}, **env_config})


def test_frozen_lake() -> None:
    skyrl_gym.register(id="gymnasium", entry_point="skyrl_gym.adapters.gymnasium:GymnasiumEnv")
    with skyrl_gym.make("gymnasium", env_config=OmegaConf.create(LAKE), extras={"max_turns": 10}) as env:
        prompt, _ = env.init(PROMPT)
        assert prompt[0] == PROMPT[0]
        assert prompt[1]["content"] == (
            "Reach the goal.\n\n[S]FFF\nFHFH\nFFFH\nHFFG\n\nWrite your action between <action> and </action>: "
            "one of left (0), down (1), right (2), up (3)."
        )
        output = env.step("<think>left?</think>Down.")
        assert message_text(output) == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
        assert (output["reward"], output["done"]) == (0.0, False)
        for reply in ("1", "right", "<action>RIGHT</action>", "I go down"):
            env.step(reply)
        output = env.step("2")
        assert (output["reward"], output["done"], output["observations"]) == (1.0, True, [])
        assert env.get_metrics() == {"steps": 6, "invalid_actions": 0, "truncated": 0}
    with start_env(LAKE) as env:
        env.step("right")
        assert env.step("down") == {"observations": [], "reward": 0.0, "done": True, "metadata": {"action": 1}}
        with pytest.raises(RuntimeError, match="over"):
            env.step("down")


def test_illegal_reply_is_explained() -> None:
    with start_env({**LAKE, "illegal_reward": -0.1}, max_turns=4) as env:
        for reply in ("jump", "left or right", ""):
            output = env.step(reply)
            assert "one of left (0), down (1), right (2), up (3)" in message_text(output)
            assert (output["reward"], output["done"]) == (-0.1, False)
        assert env.step("4") == {"observations": [], "reward": -0.1, "done": True, "metadata": {"action": None}}
        assert env.get_metrics() == {"steps": 4, "invalid_actions": 4, "truncated": 0}
    with start_env({**LAKE, "illegal": "end"}) as env:
        assert env.step("jump")["done"]


def test_reset_arguments_and_observations_without_text() -> None:
    with GymnasiumEnv({"id": "CartPole-v1"}, {"reset": {"seed": 1}}) as env:
        assert "[0.00118216, 0.0450464, -0.035584, 0.0448649]" in env.init(PROMPT)[0][1]["content"]
        assert env.step("left")["reward"] == 1.0
    env = GymnasiumEnv(
        {"id": "Recorder-v0", "kwargs": {"action_space": spaces.Discrete(2)}, "reset": {"seed": 1}},
        {"extra_info": {"seed": 2, "reset": {"options": {"low": 3, "unset": None}}}, "data_source": "x"},
    )
    assert "seed 2, options {'low': 3}" in env.init([])[0][0]["content"]


@pytest.mark.parametrize(
    ("space", "reply", "action"),
    [
        (spaces.Discrete(3), "2", 2),
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.Discrete(500), "cell 499", 499),
        (spaces.Text(5), "hello", "hello"),
        (spaces.Box(-2, 2, (1,)), "1.5", [1.5]),
        (spaces.Box(-2, 2, ()), "0.5", 0.5),
        (spaces.Box(0, 255, (2, 2), np.uint8), "[[0, 1], [2, 255]]", [[0, 1], [2, 255]]),
        (spaces.Box(-1, 1, (3,)), "I say ```json\n[0.5, 0, 1]\n```", [0.5, 0.0, 1.0]),
        (spaces.MultiDiscrete([3, 2]), "[2, 1]", [2, 1]),
        *((spaces.MultiBinary(3), reply, [1, 0, 1]) for reply in ("[1, 0, 1]", "[true, false, true]")),
    ],
)
def test_actions_of_simple_spaces(space: Any, reply: str, action: Any) -> None:
    env = make_recording_env(space)
    output = env.step(reply)
    assert output["reward"] == 0.25, output
    assert np.asarray(last_action(env)).tolist() == action


def test_actions_of_composed_spaces() -> None:
    move = spaces.Dict({"to": spaces.Discrete(4), "force": spaces.Box(0, 1, (2,))})
    env = make_recording_env(move)
    env.step('{"to": 3, "force": [0.5, 1]}')
    assert last_action(env)["to"] == 3
    assert last_action(env)["force"].tolist() == [0.5, 1.0]
    env = make_recording_env(spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]))
    env.step('[1, "abc"]')
    assert last_action(env) == (1, "abc")


@pytest.mark.parametrize(
    ("space", "replies", "allowed"),
    [
        (spaces.Discrete(3), ["3", "-1", "1.5", "one", "9" * 30, "1 or 2"], "a whole number from 0 to 2"),
        (spaces.Text(3, charset="ab"), ["abab", "c"], "a text of 1 to 3 characters, only of ab"),
        (spaces.Box(-2, 2, (1,)), ["3", "[1, 2]", "NaN", "[true]", '"1"', "1e999"], "array of 1 numbers from -2 to 2"),
        (spaces.Box(-np.inf, np.inf, ()), ["Infinity", "1e400"], "one number from -inf to inf"),
        (spaces.Box(0, 255, (2,), np.uint8), ["[0, 256]", "[0.5, 1]", "[1]", "[-1, 0]"], "2 whole numbers from 0 to"),
        (spaces.MultiDiscrete([3, 2]), ["[3, 0]", "[1, 1, 1]", "[[1, 1]]", '["1", 1]', "{}"], "from [0, 0] to [2, 1]"),
        (spaces.MultiBinary(2), ["[2, 0]", "[0]"], "2 whole numbers, 0 or 1"),
        (spaces.Dict({"a": spaces.Discrete(2)}), ['{"b": 1}', '{"a": 2}', '{"a": true}', "[1]"], '{"a": a whole num'),
        (spaces.Tuple([spaces.Discrete(2)]), ["[]", "[2]", "[1, 1]", "{}"], "[a whole number from 0 to 1]"),
        (spaces.Box(0, 1, (2, 2)), ["[[1, 0], [1]]", "[1, 0, 1, 0]"], "a nested JSON array of 2 x 2 numbers"),
    ],
)
def test_action_outside_of_the_space_is_illegal(space: Any, replies: list[str], allowed: str) -> None:
    env = make_recording_env(space, illegal_reward=-1.0)
    for reply in [*replies, "", "\0", "{" * 1000]:
        output = env.step(reply)
        assert output["reward"] == -1.0, reply
        assert allowed in message_text(output)
    assert env.get_metrics()["invalid_actions"] == len(replies) + 3


def test_action_names_are_matched_as_words() -> None:
    env = make_recording_env(spaces.Discrete(3), action_names=["go", "go back", "stop"])
    for reply, action in (("GO BACK", 1), ("Let us go back.", 1), ("go", 0), ("I stop here", 2), ("2", 2)):
        assert env.step(reply)["reward"] == 0.25, reply
        assert last_action(env) == action
    assert "names more than one" in message_text(env.step("go or stop"))
    env = make_recording_env(spaces.Discrete(2), action_names=["rise", "sink"])
    for reply in ("rİse", "rıse", "ſınk", "the sİnk"):  # letters that case-insensitive patterns confuse with others
        assert "no whole number" in message_text(env.step(reply))
    assert "no whole number" in message_text(env.step("going"))


def test_every_action_of_gymnasium_has_a_name() -> None:
    for name, names in ACTION_NAMES.items():
        (env_id, *_) = sorted((i for i in gymnasium.registry if i.rpartition("-v")[0] == name), reverse=True)
        with GymnasiumEnv({"id": env_id}, {}) as env:
            assert env._env.action_space.n == len(names)  # type: ignore[union-attr]


def test_environment_is_closed_once() -> None:
    env = make_recording_env(spaces.Discrete(2))
    env.close()
    env.close()
    assert Recorder.last is not None
    assert Recorder.last.n_closed == 1
    with pytest.raises(RuntimeError, match="over"):
        env.step("1")
    with pytest.raises(ValueError, match="cannot be written as text or JSON"):
        make_recording_env(spaces.Sequence(spaces.Discrete(2)))
    assert Recorder.last.n_closed == 1


@pytest.mark.parametrize(
    ("env_config", "message"),
    [
        ({}, r"gymnasium\.id is missing"),
        ({"id": "FrozenLake-v9"}, r"gymnasium\.id='FrozenLake-v9': .*FrozenLake"),
        ({"id": "Nothing-v0"}, r"gymnasium\.id='Nothing-v0'"),
        ({**LAKE, "action_names": ["up"]}, r"action_names=\['up'\] do not fit Discrete\(4\)"),
        ({**LAKE, "illegal": "ignore"}, "illegal='ignore' is unknown; use retry or end"),
    ],
)
def test_invalid_config_raises(env_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GymnasiumEnv(env_config, {})
