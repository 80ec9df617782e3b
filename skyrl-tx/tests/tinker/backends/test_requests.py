from __future__ import annotations

from collections import Counter

from tx.tinker.backends.requests import MOST_PASSED, Ongoing, Turns
from tx.tinker.types import SampleRequest, SamplingParams


def turns_of(**n_samples: int) -> Turns[Ongoing[str]]:
    """Requests by name; their weights are their names."""
    turns: Turns[Ongoing[str]] = Turns()
    for name, n in n_samples.items():
        turns.add(request(name, n))
    return turns


def request(name: str, n_samples: int, owner: str = "") -> Ongoing[str]:
    ask = SampleRequest([1], SamplingParams(max_tokens=1), n_samples, owner=owner)
    return Ongoing(ask, name, lambda _: None)


def begin(turns: Turns[Ongoing[str]], *, without: str = "", most: int = 1000) -> str:
    """Whose samples begin where there is room for so many, but none for those of one request."""
    begun = ""

    def try_it(request: Ongoing[str]) -> bool:
        nonlocal begun
        if request.weights == without or len(begun) == most:
            return False
        begun += request.weights
        request.n_begun += 1
        return True

    turns.begin(try_it)
    return begun


def test_samples_begin_in_turns() -> None:
    turns = turns_of(a=9, b=1)
    assert begin(turns, most=2) == "aa"
    turns.add(request("c", 6))
    assert [begin(turns, most=n) for n in (4, 5, 1)] == ["aabc", "cccaa", "a"]
    assert begin(turns) == "acca"
    assert len(turns) == 0


def test_owners_take_turns() -> None:
    turns: Turns[Ongoing[str]] = Turns()
    for name, owner in {"a": "many", "b": "many", "c": "many", "d": "few"}.items():
        turns.add(request(name, 8, owner))
    assert begin(turns, most=20) == "aaaaddddbbbbddddcccc"
    turns.add(request("e", 4, "late"))
    turns.add(request("f", 4, "few"))
    assert begin(turns) == "aaaaeeeeffffbbbbcccc"


def test_who_has_cancelled_much_waits_no_longer_for_it() -> None:
    turns: Turns[Ongoing[str]] = Turns()
    turns.add(request("a", 12, "other"))
    turns.add(request("b", 12, "another"))
    cancels = [turns.add(request("x", 4, "one")) for _ in range(9)]
    turns.add(request("c", 4, "one"))
    for cancel in cancels:
        cancel()
    turns.take_cancelled()
    turns.add(request("d", 4, "one"))
    assert begin(turns) == "aaaabbbbccccddddaaaabbbbaaaabbbb"


def test_those_without_room_are_passed_for_a_while() -> None:
    turns = turns_of(a=2, b=500, c=500)
    assert begin(turns, without="a", most=10) == "bbbbccccbb"
    assert Counter(begin(turns, without="a")) == {"b": MOST_PASSED // 2 - 6, "c": MOST_PASSED // 2 - 4}
    assert begin(turns, without="a") == ""
    assert begin(turns, most=7) == "aabbbbc"


def test_who_is_cancelled_has_no_turn() -> None:
    turns = turns_of(b=1)
    cancel = turns.add(request("a", 9))
    assert turns.take_cancelled() == []
    cancel()
    assert [one.weights for one in turns.take_cancelled()] == ["a"]
    assert begin(turns) == "b"
