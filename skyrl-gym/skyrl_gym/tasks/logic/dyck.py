"""Bracket sequences: complete the end, complete the start, or find the errors in a step-by-step reading."""

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from skyrl_gym.tasks.logic.puzzle import Puzzle
from skyrl_gym.tasks.replies import last_line

KINDS = ("()", "[]", "{}", "<>", "⟨⟩", "⟦⟧", "⦃⦄", "⦅⦆")
OPENING_OF = {kind[1]: kind[0] for kind in KINDS}
CLOSING_OF = {kind[0]: kind[1] for kind in KINDS}

_QUOTED = re.compile(r"`+([^`]*)`+")
_STEPS = re.compile(r"\d+(?:\s*,\s*\d+)*\.?", re.ASCII)
EMPTY = "empty"


def create_completion(rng: Random) -> Puzzle:
    """Create a sequence of 40 to 60 brackets and cut off its last 20 to 50%, all of them closing brackets."""
    length = rng.randrange(40, 61, 2)
    n_missing = rng.randint(length // 5, length // 2)
    n_opening = length // 2
    question = random_sequence(rng, rng.sample(KINDS, 3), n_opening, n_opening - n_missing)
    answer = question + "".join(CLOSING_OF[opening] for opening in reversed(stack_after(question)))
    prompt = (
        "Complete this sequence so that every bracket is closed by its partner, in the right order. Add closing "
        f"brackets at the end, as few as necessary, and change nothing else.\n\nSequence: {question}\n\n"
        "End your reply with the complete sequence on a line of its own."
    )
    return Puzzle(prompt, answer, answer)


def create_prefix(rng: Random) -> Puzzle:
    """Create a sequence of 6 to 60 brackets without some of the opening brackets at its start."""
    n_pairs = rng.randint(3, 30)
    n_first = rng.randint(1, min(6, n_pairs))
    kinds = rng.sample(KINDS, rng.randint(3, 8))
    start = "".join(rng.choice(kinds)[0] for _ in range(n_first))
    body = random_sequence(rng, kinds, n_pairs - n_first, n_pairs - n_first)
    answer = start
    stack = list(start)
    while body or stack:  # insert the missing closing brackets at random positions of balanced text
        if stack and (not body or rng.random() < 0.3):
            answer += CLOSING_OF[stack.pop()]
        else:
            end = next(n for n in range(2, len(body) + 1, 2) if not stack_after(body[:n]))
            answer, body = answer + body[:end], body[end:]
    question = answer[rng.randint(1, n_first) :]
    prompt = (
        "The start of a correctly nested sequence of brackets is lost. Only opening brackets are missing; put the "
        f"fewest possible in front so that the whole sequence is correctly nested.\n\nRest of the sequence: {question}"
        "\n\nEnd your reply with the whole sequence in backticks, such as `([])`."
    )
    return Puzzle(prompt, answer, f"`{answer}`")


def create_reasoning_errors(rng: Random) -> Puzzle:
    """Create a numbered reading of a sequence with 2 to 5 wrong stacks."""
    n_pairs = rng.randint(5, 15)
    sequence = random_sequence(rng, rng.sample(KINDS, rng.randint(2, 4)), n_pairs, n_pairs)
    stacks = ["".join(stack_after(sequence[: n + 1])) for n in range(len(sequence))]
    wrong = sorted(rng.sample(range(len(sequence)), rng.randint(2, 5)))
    for n in wrong:
        stacks[n] = _corrupt(rng, stacks[n], sequence)
    thoughts = "\n".join(
        f"Thought {n}: read {bracket}, the stack is now {stack or EMPTY}"
        for n, (bracket, stack) in enumerate(zip(sequence, stacks, strict=True), start=1)
    )
    prompt = (
        "Someone reads a sequence of brackets and keeps the open ones on a stack, the innermost last. Some thoughts "
        "show a wrong stack. A thought is wrong if its stack is not the stack after all brackets read so far, "
        f"whatever the thoughts before it say.\n\nSequence: {sequence}\n{thoughts}\n\n"
        "Which thoughts are wrong? End your reply with their numbers, separated by commas, on a line of its own."
    )
    answer = ", ".join(str(n + 1) for n in wrong)
    return Puzzle(prompt, answer, answer)


def is_whole_sequence(answer: str, truth: str, facts: Mapping[str, Any]) -> bool:
    """Return True if the last line, without label and spaces, is the sequence."""
    return "".join(last_line(answer).rpartition(":")[2].split()) == truth


def is_quoted_sequence(answer: str, truth: str, facts: Mapping[str, Any]) -> bool:
    """Return True if the last text of brackets in backticks is the sequence."""
    quoted = ["".join(text.split()) for text in _QUOTED.findall(answer)]
    sequences = [text for text in quoted if text and all(c in OPENING_OF or c in CLOSING_OF for c in text)]
    return bool(sequences) and sequences[-1] == truth


def are_steps(answer: str, truth: str, facts: Mapping[str, Any]) -> bool:
    """Return True if the last line holds exactly these numbers, in any order."""
    line = last_line(answer).rpartition(":")[2].strip()
    return len(line) <= 1000 and bool(_STEPS.fullmatch(line)) and _numbers(line) == _numbers(truth)


def stack_after(text: str) -> list[str]:
    """Return the unmatched opening brackets. Raises ValueError if a closing bracket is unmatched."""
    stack: list[str] = []
    for bracket in text:
        if bracket in CLOSING_OF:
            stack.append(bracket)
        elif not stack or stack.pop() != OPENING_OF.get(bracket):
            raise ValueError(f"{text!r} is not correctly nested at {bracket!r}")
    return stack


def random_sequence(rng: Random, kinds: Sequence[str], n_opening: int, n_closing: int) -> str:
    """Return a bracket sequence whose closing brackets are all matched."""
    text = ""
    stack: list[str] = []
    while n_opening or n_closing:
        if not stack or not n_closing or (n_opening and rng.random() < n_opening / (n_opening + n_closing)):
            stack.append(rng.choice(kinds)[0])
            text, n_opening = text + stack[-1], n_opening - 1
        else:
            text, n_closing = text + CLOSING_OF[stack.pop()], n_closing - 1
    return text


def _corrupt(rng: Random, stack: str, sequence: str) -> str:
    """Return a wrong stack: without its top, with an extra bracket, or with one replaced."""
    openings = sorted({bracket for bracket in sequence if bracket in CLOSING_OF})
    choices = [stack + opening for opening in openings]
    if stack:
        choices.append(stack[:-1])
        choices += [stack[:-1] + opening for opening in openings if opening != stack[-1]]
    return rng.choice(choices)


def _numbers(line: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d{1,9}", line, re.ASCII)}
