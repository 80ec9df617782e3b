import random

import pytest
from gym_kit.games import ScriptedModel, position
from gym_kit.messages import user

from skyrl_gym.envs.openspiel import prompts
from skyrl_gym.envs.openspiel.cases import State, load_game
from skyrl_gym.envs.openspiel.match import MatchTurn
from skyrl_gym.envs.openspiel.moves import legal_moves
from skyrl_gym.envs.openspiel.opponents import MctsConfig, MctsOpponent, PolicyOpponent
from skyrl_gym.envs.openspiel.states import draw_position


def make_turn(state: State, events: tuple[str, ...] = ()) -> MatchTurn:
    player = state.current_player()
    return MatchTurn(state, player, legal_moves(state, player), events)


def tic_tac_toe(*actions: int) -> MatchTurn:
    return make_turn(position("tic_tac_toe", *actions))


def test_search_finds_a_win_and_prevents_a_loss() -> None:
    game = load_game("tic_tac_toe")
    opponent = MctsOpponent(game, MctsConfig(n_simulations=200))
    for seed in range(5):
        assert opponent.choose(tic_tac_toe(0, 3, 1, 4), random.Random(seed)) == 2  # x completes the row
        assert opponent.choose(tic_tac_toe(0, 8, 1), random.Random(seed)) == 2  # o stops it


def test_search_does_not_use_hidden_cards() -> None:
    """The move depends on the player's knowledge alone, not on the opponent's cards."""
    game = load_game("leduc_poker")
    choices = []
    for hidden in (0, 1, 2, 4):
        state = position("leduc_poker", 3, hidden)  # the own card, the other's
        opponent = MctsOpponent(game, MctsConfig(n_simulations=50, n_worlds=5))
        choices.append([opponent.choose(make_turn(state), random.Random(seed)) for seed in range(10)])
    assert choices == choices[:1] * 4


@pytest.mark.parametrize("case", ["euchre", "gin_rummy", "kuhn_poker", "leduc_poker", "oh_hell", "universal_poker"])
def test_search_plays_whole_games_with_hidden_cards(case: str) -> None:
    game = load_game(case)
    opponent = MctsOpponent(game, MctsConfig(n_simulations=3, n_worlds=2))
    for seed in range(3):
        state, rng = draw_position(game, seed, 0), random.Random(seed)
        for _ in range(60):
            while state.is_chance_node():
                state.apply_action(rng.choice([action for action, _ in state.chance_outcomes()]))
            if state.is_terminal():
                break
            action = opponent.choose(make_turn(state), rng)
            assert action in state.legal_actions()
            state.apply_action(action)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("goofspiel", "its players move at the same time"),
        ("cribbage", "it gives rewards before its end"),
        ("liars_dice", "its hidden information cannot be sampled"),
        ("hearts", "its hidden information cannot be sampled"),
    ],
)
def test_search_refuses_unsupported_games(case: str, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=f"cannot play {case}.*: {reason}; use opponent=random or policy"):
        MctsOpponent(load_game(case), MctsConfig())
    assert capfd.readouterr() == ("", "")


def test_policy_may_correct_an_illegal_answer() -> None:
    model = ScriptedModel("e9", "b9", "\\boxed{o(1,1)}")
    opponent = PolicyOpponent(model, 100, n_retries=2)
    assert opponent.choose(tic_tac_toe(0), random.Random(0)) == 4
    assert opponent.n_illegal == 2
    assert [model.asked[2][2]] == user(prompts.format_illegal_answer(2))
    assert [model.asked[2][4]] == user(prompts.format_illegal_answer(1))


def test_random_move_is_played_and_reported_after_illegal_answers() -> None:
    model = ScriptedModel("", "", "\\boxed{0}")
    opponent = PolicyOpponent(model, 100, n_retries=1)
    turn = tic_tac_toe(0)
    drawn = opponent.choose(turn, random.Random(7))
    assert drawn == random.Random(7).choice(turn.legal.moves).action
    text = next(move.text for move in turn.legal.moves if move.action == drawn)
    opponent.choose(tic_tac_toe(0, drawn, 8 if drawn != 8 else 7), random.Random(0))
    assert model.asked[2][-1]["content"].startswith(prompts.format_random_move(text))
    assert [message["role"] for message in model.asked[2]] == ["user", "assistant", "user", "assistant", "user"]
    assert opponent.n_illegal == 2


def test_a_policy_must_return_text() -> None:
    silent = PolicyOpponent(lambda messages: None, 100, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must return its reply as text, got None"):
        silent.choose(tic_tac_toe(), random.Random(0))
