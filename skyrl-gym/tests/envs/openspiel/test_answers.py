"""Parsing of moves. `graders/openspiel.yaml` has replies with and without a move."""

import random
import re

import pytest
from gym_kit.games import HEX, POKER
from gym_kit.texts import linear_time, long_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_gym.envs.openspiel.answers import final_answer, parse_answer
from skyrl_gym.envs.openspiel.cases import AVAILABLE_CASES, load_game
from skyrl_gym.envs.openspiel.moves import LegalMoves, legal_moves
from skyrl_gym.envs.openspiel.states import draw_position, is_simultaneous, legal_actions

CHESS = legal_moves(load_game("chess").new_initial_state(), 1)
OWARE = legal_moves(load_game("oware").new_initial_state(), 0)


def parse(reply: str, legal: LegalMoves = HEX) -> str | None:
    move = parse_answer(reply, legal).move
    return move.text if move else None


FORMS = (
    "{}",
    " {} ",
    "**{}**",
    "`{}`",
    "({}).",
    "Answer: {}",
    "Let me see.\n\n{}\n",
    "\\boxed{{{}}}",
    "$\\boxed{{{}}}$",
    "\\boxed{{\\text{{{}}}}}",
    "<action>{}</action>",
    "<think>first a1, then 0</think>\n{}",
    "hm</think>{}",
)


@st.composite
def decisions(draw: st.DrawFn) -> LegalMoves:
    """Draw the legal moves of a random decision of a random case."""
    game = load_game(draw(st.sampled_from(AVAILABLE_CASES)))
    state = draw_position(game, draw(st.integers(0, 10_000)), draw(st.integers(0, 40)))
    players = [player for player in range(game.num_players()) if legal_actions(state, player)]
    player = draw(st.sampled_from(players)) if is_simultaneous(state) else state.current_player()
    return legal_moves(state, player)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(legal=decisions(), pick=st.integers(0, 10_000), forms=st.randoms(use_true_random=False))
def test_every_legal_move_is_read_from_its_text_and_from_its_number(
    legal: LegalMoves, pick: int, forms: random.Random
) -> None:
    move = legal.moves[pick % len(legal.moves)]
    written = forms.choice([move.text, move.raw, str(move.number), f"{move.number}: {move.text}"])
    form = forms.choice(FORMS)
    assert parse_answer(form.format(written), legal).move == move


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(legal=decisions(), noise=st.data())
def test_parsed_move_is_a_word_of_the_answer(legal: LegalMoves, noise: st.DataObject) -> None:
    words = st.sampled_from([move.text for move in legal.moves])
    marks = st.sampled_from([" ", " ", "\n", ",", "-", "+", "/", "=", "(", ")", "x", "7", "**", ": ", "\\boxed{", "}"])
    reply = "".join(noise.draw(st.lists(words | marks | st.text(max_size=2), max_size=8)))
    move = parse_answer(reply, legal).move
    if move is None:
        return
    names = "|".join(map(re.escape, (move.text, " ".join(move.raw.split()), str(move.number))))
    word = rf"(?<![A-Za-z0-9+/=,.-])(?:{names})(?![A-Za-z0-9+/=#-])"
    assert re.search(word, " ".join(reply.split()), re.IGNORECASE)


@settings(max_examples=100, deadline=None)
@given(word=st.text(alphabet="ab12-/+=x#&", min_size=1, max_size=5))
def test_other_words_name_no_move(word: str) -> None:
    legal = {move.text for move in HEX.moves} | {str(move.number) for move in HEX.moves}
    is_number = word.removeprefix("#") in {str(move.number) for move in HEX.moves}
    assert (parse(word) is not None) == (word in legal or is_number)


@pytest.mark.parametrize(
    ("reply", "legal", "move"),
    [
        ("\\boxed{raise}", POKER, "Raise"),
        ("b4", CHESS, "b4"),
        ("B4", CHESS, None),  # a bishop
        ("Nf3!?", CHESS, "Nf3"),
        ("Nf3+", CHESS, None),
        ("**a**", OWARE, "A"),
        ("I play a move", OWARE, None),  # a single letter is a move only alone
    ],
)
def test_case_is_ignored_if_unambiguous(reply: str, legal: LegalMoves, move: str | None) -> None:
    assert parse(reply, legal) == move


def test_long_castling_is_not_read_as_short_castling() -> None:
    state = load_game("chess").new_initial_state("r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1")
    legal = legal_moves(state, 1)
    assert parse("I castle: O-O-O", legal) == "O-O-O"
    assert parse("I castle: O-O", legal) == "O-O"
    without_long = LegalMoves(tuple(move for move in legal.moves if move.text != "O-O-O"), is_case_sensitive=True)
    assert parse("I castle: O-O-O", without_long) is None


def test_way_and_answer_are_reported() -> None:
    ways = {reply: parse_answer(reply, HEX).way for reply in ("b1", "1", "so b1", "so")}
    assert ways == {"b1": "text", "1": "number", "so b1": "mention", "so": "none"}
    assert final_answer("<think>a1</think>\nSo:\n  b1  \n\n") == "b1"
    assert final_answer("x \\boxed{ a {b} c } y") == "a {b} c"


@pytest.mark.parametrize(
    "reply",
    [
        *map(long_text, ("a1 ", "a1", "\\boxed{", "{", "<action>", "<action></action>", "<think>", "</think>")),
        *map(long_text, ("\n", "the answer is ", "not a1 ", "1", "\\text{", "\ud800")),
        "\\boxed{" + long_text("}"),
        long_text("(") + "a1" + long_text(")"),
    ],
    ids=lambda reply: ascii(reply[:12]),
)
def test_parsing_is_linear(reply: str) -> None:
    legal = legal_moves(load_game("amazons").new_initial_state(), 0)
    for moves in (HEX, legal):
        with linear_time():
            parse_answer(reply, moves)
