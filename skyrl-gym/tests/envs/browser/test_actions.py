from typing import Any

import pytest

from skyrl_gym.adapters.actions import ActionError
from skyrl_gym.envs.browser.actions import Action, Click, Press, Scroll, Terminate, Type, Wait, parse_action
from skyrl_gym.tools.calls import parse_tool_calls
from skyrl_gym.tools.screen import Screen

SCREEN = Screen(640, 480)


def parse(arguments: str, name: str = "computer") -> Action:
    (call,) = parse_tool_calls(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>')
    return parse_action(call, SCREEN)


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        ('{"action": "left_click", "coordinate": [320, 200]}', Click(320, 200)),
        ('{"action": "left_click", "coordinate": "[320, 200]"}', Click(320, 200)),  # formats of plain text
        ('{"action": "type", "text": "42"}', Type("42")),
        ('{"action": "key", "keys": ["enter"]}', Press("Enter")),
        ('{"action": "key", "keys": ["ctrl", "a"]}', Press("Control+a")),
        ('{"action": "key", "text": "Shift+Tab"}', Press("Shift+Tab")),
        ('{"action": "key", "key": "Page_Down"}', Press("PageDown")),
        ('{"action": "key", "keys": ["A"]}', Press("A")),
        ('{"action": "scroll", "pixels": -300}', Scroll(300)),
        ('{"action": "scroll", "pixels": "120.4"}', Scroll(-120)),
        ('{"action": "wait"}', Wait(1)),
        ('{"action": "wait", "time": 0.5}', Wait(0.5)),
        ('{"action": "wait", "time": 600}', Wait(1)),
        ('{"action": "terminate", "status": "success"}', Terminate("success", None)),
        ('{"action": "terminate", "status": "failure", "answer": 4}', Terminate("failure", "4")),
    ],
)
def test_actions_are_parsed(arguments: str, action: Action) -> None:
    assert parse(arguments) == action
    assert parse(arguments, "computer_use") == action


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{}", "action=None is unknown; use one of left_click, type, key, scroll, wait, terminate"),
        ('{"action": "left_click"}', "coordinate=None must be two numbers"),
        ('{"action": "left_click", "coordinate": [700, 20]}', r"coordinate=\[700, 20\] is outside the screenshot"),
        ('{"action": "type"}', "text must have between 1 and 1000 characters"),
        ('{"action": "type", "text": 42}', "text must have"),
        ('{"action": "key"}', "keys must be a list of names"),
        ('{"action": "key", "keys": ["ctrl", "w"]}', r"keys=\['ctrl', 'w'\] cannot be pressed"),
        ('{"action": "key", "keys": ["alt", "left"]}', "cannot be pressed"),
        ('{"action": "key", "keys": ["shift", "return"]}', "also with shift, except enter"),
        ('{"action": "key", "keys": ["ctrl", "shift", "a"]}', "cannot be pressed"),
        ('{"action": "key", "keys": ["f5"]}', "cannot be pressed"),
        ('{"action": "key", "keys": [3]}', "keys must be a list of names"),
        ('{"action": "scroll"}', "pixels=None must be a number"),
        ('{"action": "scroll", "pixels": 1e9}', "pixels=1000000000.0 must be a number between -10000 and 10000"),
        ('{"action": "wait", "time": -1}', "time=-1 must be a number"),
        ('{"action": "terminate"}', "status=None must be success or failure"),
    ],
)
def test_invalid_actions_are_explained(arguments: str, message: str) -> None:
    with pytest.raises(ActionError, match=message):
        parse(arguments)


def test_other_tools_are_refused() -> None:
    with pytest.raises(ActionError, match="There is no tool 'python'; call computer"):
        parse('{"action": "wait"}', "python")


@pytest.mark.parametrize("keys", ["", "+", [], ["", ""], None])
def test_keys_without_a_name_are_refused(keys: Any) -> None:
    import json

    with pytest.raises(ActionError):
        parse(json.dumps({"action": "key", "keys": keys}))
