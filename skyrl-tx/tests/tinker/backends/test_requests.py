from collections import Counter

from tx.tinker.backends.requests import MAX_OVERTAKING, RequestState, TurnQueue
from tx.tinker.types import SampleRequest, SamplingParams

Turns = TurnQueue[RequestState[str]]
"""Requests by name; the weights of each are its name."""


def turns_of(n_samples: dict[str, int], owners: dict[str, str] | None = None) -> Turns:
    turns: Turns = TurnQueue()
    for name, n in n_samples.items():
        turns.add(request(name, n, (owners or {}).get(name, "")))
    return turns


def request(name: str, n_samples: int, owner: str = "") -> RequestState[str]:
    spec = SampleRequest([1], SamplingParams(max_tokens=1), n_samples, owner=owner)
    return RequestState(spec, name, lambda _: None)


def begin(turns: Turns, *, without: str = "", max_samples: int = 1000) -> str:
    """Begin samples while there is room, but none of the request `without`; return their names."""
    begun = ""

    def try_it(request: RequestState[str]) -> bool:
        nonlocal begun
        if request.weights == without or len(begun) == max_samples:
            return False
        begun += request.weights
        request.n_begun += 1
        return True

    turns.begin(try_it)
    return begun


def test_samples_begin_in_turns() -> None:
    turns = turns_of({"a": 9, "b": 1})
    assert begin(turns, max_samples=2) == "aa"
    turns.add(request("c", 6))
    assert [begin(turns, max_samples=n) for n in (4, 5, 1)] == ["aabc", "cccaa", "a"]
    assert begin(turns) == "acca"
    assert len(turns) == 0


def test_owners_take_turns() -> None:
    turns = turns_of(dict.fromkeys("abcd", 8), {"a": "many", "b": "many", "c": "many", "d": "few"})
    assert begin(turns, max_samples=20) == "aaaaddddbbbbddddcccc"
    turns.add(request("e", 4, "late"))
    turns.add(request("f", 4, "few"))
    assert begin(turns) == "aaaaeeeeffffbbbbcccc"


def test_cancelled_requests_do_not_delay_their_owner() -> None:
    turns = turns_of({"a": 12, "b": 12}, {"a": "other", "b": "another"})
    cancels = [turns.add(request("x", 4, "one")) for _ in range(9)]
    turns.add(request("c", 4, "one"))
    assert turns.take_cancelled() == []
    for cancel in cancels:
        cancel()
    assert [one.weights for one in turns.take_cancelled()] == ["x"] * 9
    turns.add(request("d", 4, "one"))
    assert begin(turns) == "aaaabbbbccccddddaaaabbbbaaaabbbb"


def test_samples_that_do_not_fit_are_overtaken_for_a_while() -> None:
    turns = turns_of({"a": 2, "b": 500, "c": 500})
    assert begin(turns, without="a", max_samples=10) == "bbbbccccbb"
    assert Counter(begin(turns, without="a")) == {"b": MAX_OVERTAKING // 2 - 6, "c": MAX_OVERTAKING // 2 - 4}
    assert begin(turns, without="a") == ""
    assert begin(turns, max_samples=7) == "aabbbbc"
