from pathlib import Path

import pytest
import yaml
from gym_kit.processes import run_python

from skyrl_gym.envs.openspiel.cases import (
    AVAILABLE_CASES,
    BOARD_SIZE_CASES,
    DEFAULT_GAME_LIST,
    FOCUS_CASES,
    canonical,
    load_game,
    resolve_cases,
)

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))


def test_every_available_case_loads() -> None:
    for case in (*AVAILABLE_CASES, *BOARD_SIZE_CASES, *DEFAULT_GAME_LIST):
        assert canonical(case) == case
        assert load_game(case).num_players() >= 1
    sizes = [len(set(cases)) for cases in (BOARD_SIZE_CASES, FOCUS_CASES, AVAILABLE_CASES, DEFAULT_GAME_LIST)]
    assert sizes == [16, 17, 34, 20]
    assert AVAILABLE_CASES[:17] == FOCUS_CASES


@pytest.mark.parametrize(("written", "meant"), CASES["canonical"].items())
def test_canonical_name_of_a_case(written: str, meant: str) -> None:
    assert canonical(written) == meant
    assert str(load_game(written)).removesuffix("()") in (meant, str(load_game(meant)).removesuffix("()"))


@pytest.mark.parametrize(("case", "message"), CASES["refused"].items())
def test_unplayable_case_is_refused_with_the_reason(case: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=message):
        load_game(case)
    if "known" in message or "did you mean" in message:
        assert capfd.readouterr() == ("", "")


def test_selection_of_cases() -> None:
    assert resolve_cases() == AVAILABLE_CASES
    assert resolve_cases(["pig", "go(go_board_size=9)"], game_list=["hex"]) == ("pig", "go(board_size=9)")
    selected = resolve_cases(game_types="breakthrough(rows=6,columns=6),go(go_board_size=9)")
    assert selected == ("breakthrough(columns=6,rows=6)", "go(board_size=9)")
    configs = {"hex": [{"board_size": 3}, {"board_size": 4}], "breakthrough": [{"rows": 6, "columns": 5}]}
    cases = resolve_cases(game_list=["pig", "hex", "breakthrough"], game_configs=configs)
    assert cases == ("pig", "hex(board_size=3)", "hex(board_size=4)", "breakthrough(columns=5,rows=6)")
    cases = resolve_cases(game_configs={"go": [{"go_board_size": 9}]})
    assert len(cases) == len(DEFAULT_GAME_LIST)
    assert cases[DEFAULT_GAME_LIST.index("go")] == "go(board_size=9)"
    with pytest.raises(ValueError, match=r"game_types=\['chess'\] matches none of the cases \['hex'\]"):
        resolve_cases("hex", game_types=["chess"])
    with pytest.raises(ValueError, match="game_configs has hex, but game_list does not"):
        resolve_cases(game_list=["pig"], game_configs={"hex": [{"board_size": 3}]})


@pytest.mark.parametrize("game_types", ["hex,go, chess ", ["hex", "go", "chess", " "]])
def test_game_types_select_games_by_their_whole_name(game_types: str | list[str]) -> None:
    selected = resolve_cases(game_types=game_types)
    assert {case.split("(")[0] for case in selected} == {"hex", "go", "chess"}
    assert len([case for case in selected if case.startswith("hex(")]) == 4


def test_missing_open_spiel_names_the_extra() -> None:
    code = """
import sys
sys.modules["pyspiel"] = None
from skyrl_gym.envs.openspiel.env import OpenSpielEnv
from skyrl_gym.envs.openspiel.game_env import OpenSpielGameEnv
for env in (OpenSpielEnv, OpenSpielGameEnv):
    try:
        env(env_config={}, extras={"extra_info": {"task_id": 0}})
    except ImportError as problem:
        print(problem)
"""
    assert run_python(code).stdout.count("pip install './skyrl-gym[openspiel]'") == 2
