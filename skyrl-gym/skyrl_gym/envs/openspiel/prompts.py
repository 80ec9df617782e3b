"""Prompts that describe a decision, for the trained model and for language models as opponents."""

from collections.abc import Sequence

from skyrl_gym.envs.openspiel.cases import Game, State, open_spiel
from skyrl_gym.envs.openspiel.moves import LegalMoves

ANSWER_FORMAT = (
    "Reply with exactly one legal action, by its text or by its number. You may think first; end with the action in "
    "\\boxed{}."
)

RULES = {
    "backgammon": (
        "Player 0 has the checkers x, player 1 has o. A move is written from/to for each die, in the mover's own count "
        "of the points; Bar and Off are the bar and the tray. Who bears off all 15 checkers first wins."
    ),
    "battleship": (
        "Players place their ships, then shoot in turns at (row, column). On your board letters are your ships, a "
        "capital letter a hit and * a miss of the opponent; among your shots # is a hit and @ is water. Sink what you "
        "can."
    ),
    "blackjack": "Come closer to 21 than the dealer, without going over it.",
    "breakthrough": (
        "Pieces move one square forward, straight or diagonally, and capture diagonally (marked *). Player 0 has b and "
        "moves down to row 1, player 1 has w and moves up. Who first reaches the last row, or takes every piece, wins."
    ),
    "checkers": (
        "Player 0 has o (kings 8) and moves up, player 1 has + (kings *) and moves down. Captures are mandatory. Who "
        "cannot move loses; 40 moves without a capture are a draw."
    ),
    "chess": "The position is in FEN. White is player 1, Black is player 0. Moves are in algebraic notation.",
    "clobber": (
        "A move takes a neighboring piece of the opponent, not diagonally, by moving onto it: a5b5 moves from a5 to "
        "b5. Player 0 has o, player 1 has x. Who cannot move loses."
    ),
    "connect_four": "Player 0 has x, player 1 has o. The number in a move is the column. Four in a row win.",
    "cribbage": "A hand of cribbage: choose cards for the crib, then play. The first to 121 points wins.",
    "dots_and_boxes": (
        "A move draws a line, h or v, at row, column. Who draws the fourth side of a box owns it and moves again. Who "
        "owns more boxes wins."
    ),
    "euchre": (
        "Players 0 to 3 are North, East, South and West; 0 and 2 play against 1 and 3. Bid for trumps, then win tricks."
    ),
    "gin_rummy": (
        "One hand of gin rummy: form sets and runs, and knock when your deadwood is low enough, or go gin. Moves are "
        "draws, passes, cards to discard, melds to lay and knocks."
    ),
    "go": "Player 0 has the black stones X, player 1 the white stones O. Area scoring. The column letters have no i.",
    "goofspiel": (
        "Each turn a point card is shown, and all players bid a card of their hand at once. The highest bid takes the "
        "point card; nobody takes it when the highest are equal. Most points win."
    ),
    "hearts": (
        "Players 0 to 3 are North, East, South and West. Take as few points as you can: 1 for each heart, 13 for the "
        "queen of spades. Taking all of them is best."
    ),
    "hex": (
        "A cell touches six others: beside it in its row, and two in each of the rows above and below, which are "
        "shifted as shown. Player 0 has x and connects the top row with the bottom row, player 1 has o and connects "
        "the left side with the right side. In a1, a is the column and 1 the row, the top one."
    ),
    "kuhn_poker": "Three cards, 0 to 2; each player has one, and the higher one wins at showdown. Bet and Pass.",
    "latent_ttt": (
        "Tic-tac-toe in which a mark is shown to the opponent only after their next move; a mark on a taken square is "
        "lost. Player 0 has x, player 1 has o; (row, column)."
    ),
    "leduc_poker": (
        "Six cards, 0 to 5, of which 0 and 1, 2 and 3, 4 and 5 are of equal rank. Each player has a private card; a "
        "public card comes in round 2. A pair with it wins, then the higher rank. In a round's history 0 is Fold, 1 is "
        "Call and 2 is Raise."
    ),
    "liars_dice": (
        "You see your own dice, then the bids so far. The bid 2-3 says that among all dice at least two show 3; the "
        "highest face is wild. Bid higher, or call the last bid a lie: Liar."
    ),
    "othello": "Player 0 is Black (x), player 1 is White (o). In d3, d is the column and 3 the row. Most discs win.",
    "phantom_ttt": (
        "Tic-tac-toe in which you do not see the opponent's marks until you try their square; then you may try again. "
        "Player 0 has x, player 1 has o; (row, column)."
    ),
    "pig": (
        "Roll as often as you like: a 1 ends your turn and loses its total, any other roll adds to it; stop keeps it. "
        "The first to reach the winning score, usually 100, wins."
    ),
    "quoridor": (
        "Player 0 is 0 and walks up to row 1, player 1 is @ and walks down. A move is a square to walk to, or a wall: "
        "a square with v (vertical) or h (horizontal). Walls may not close the last way."
    ),
    "tic_tac_toe": "Player 0 has x, player 1 has o; (row, column). Three in a row win.",
}
"""Rules that the position does not show, by game. All other games are shown without rules."""

_OBSERVED = frozenset({"battleship", "blackjack"})
"""Games with hidden information whose observation string is complete and more readable than the information state."""


def format_introduction(game: Game) -> str:
    """Format a game's name and a summary of its rules. They are the same for every player."""
    rules = RULES.get(game.get_type().short_name)
    return f"Game: {str(game).removesuffix('()')}" + (f"\n{rules}" if rules else "")


def format_decision(
    state: State, player: int, legal: LegalMoves, max_listed_moves: int, events: Sequence[str] = ()
) -> str:
    """Format a decision of `player`: events since the last decision, observation, legal moves, and answer format."""
    event_lines = ["\n".join(events)] if events else []
    position = f"You are player {player}.\nCurrent state (your turn):\n{format_observation(state, player)}"
    return "\n\n".join([*event_lines, position, format_moves(legal, max_listed_moves), ANSWER_FORMAT])


def format_illegal_answer(n_left: int) -> str:
    """Format the feedback after an illegal answer when `n_left` tries are left."""
    tries = "1 more try" if n_left == 1 else f"{n_left} more tries"
    return f"That is not a legal action; it is still your turn, and you have {tries}. {ANSWER_FORMAT}"


def format_random_move(move: str) -> str:
    """Format the feedback after a random move replaces an illegal answer."""
    return f"Your answer was not a legal action; a random one was played for you: {move}."


def format_moves(legal: LegalMoves, max_listed_moves: int) -> str:
    """Format the first `max_listed_moves` legal moves with their numbers, one per line."""
    shown = legal.moves[:max_listed_moves]
    lines = [f"{move.number}: {move.text}" for move in shown]
    if len(shown) < len(legal.moves):
        lines.append(f"... ({len(legal.moves)} in all; the others are legal too, by their text)")
    return "\n".join(["Legal actions:", *lines])


def format_observation(state: State, player: int) -> str:
    """Format the state as `player` sees it, without information that is hidden from them."""
    kind = state.get_game().get_type()
    is_open = kind.information == open_spiel().GameType.Information.PERFECT_INFORMATION
    prefers_observation = is_open or kind.short_name in _OBSERVED or not kind.provides_information_state_string
    if prefers_observation and kind.provides_observation_string:
        text = state.observation_string(player)
    elif is_open:
        text = str(state)
    else:
        text = state.information_state_string(player)
    return str(text).strip("\n")
