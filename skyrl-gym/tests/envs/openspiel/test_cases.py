import pytest
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


def test_every_available_case_loads() -> None:
    for case in (*AVAILABLE_CASES, *BOARD_SIZE_CASES, *DEFAULT_GAME_LIST):
        assert canonical(case) == case
        assert load_game(case).num_players() >= 1
    sizes = [len(set(cases)) for cases in (BOARD_SIZE_CASES, FOCUS_CASES, AVAILABLE_CASES, DEFAULT_GAME_LIST)]
    assert sizes == [16, 17, 34, 20]
    assert AVAILABLE_CASES[:17] == FOCUS_CASES


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("go(go_board_size=9)", "go(board_size=9)"),
        ("latent_tic_tac_toe", "latent_ttt"),
        ("phantom_tic_tac_toe", "phantom_ttt"),
        (" breakthrough( rows=6, columns=6 ) ", "breakthrough(columns=6,rows=6)"),
        ("othello()", "othello"),
        ("misere(game=tic_tac_toe())", "misere(game=tic_tac_toe())"),
        ("goofspiel(imp_info=True,num_cards=4)", "goofspiel(imp_info=True,num_cards=4)"),
    ],
)
def test_canonical_name_of_a_case(written: str, meant: str) -> None:
    assert canonical(written) == meant
    assert str(load_game(written)).removesuffix("()") in (meant, str(load_game(meant)).removesuffix("()"))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("hexx", "unknown game, 'hexx'; did you mean 'hex'"),
        ("othello(board_size=6)", "unknown parameter of othello, 'board_size'; known: none"),
        ("hex(bord_size=6)", "did you mean 'board_size'"),
        ("hex(board_size=5", "must be a game with its parameters"),
        ("hex((board_size=5)", r"has 2 '\(' and 1 '\)'"),
        ("", "must be a game with its parameters"),
        ("hex(board_size=x)", "cannot load the case 'hex.board_size=x.*Wrong type"),
        ("nfg_game", "cannot load the case"),
        ("mfg_garnet", "mean-field"),
        ("negotiation", "draws its chance events itself"),
    ],
)
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
