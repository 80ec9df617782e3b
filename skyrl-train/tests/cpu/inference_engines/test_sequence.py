import pytest
from transformers import PreTrainedTokenizerBase

from skyrl_train.inference_engines.base import EngineRequest, SamplingParams, StopReason
from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.inference_engines.sequence import ActiveSequence, all_eos_ids, find_stop_reason

LONG_TOKEN = "ActionĠ(L/R/S):"  # one token of the tiny tokenizer: "Action (L/R/S):"
RESPONSE = [*"defghijklmnop", LONG_TOKEN, "7", "8"]


def end_of_response(
    tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams, eos_ids: frozenset[int] = frozenset()
) -> tuple[str, StopReason | None]:
    """Append `RESPONSE` to the prompt `abc`, token by token. Return text and stop reason where the rules end it."""
    prompt_ids = tokenizer.convert_tokens_to_ids(list("abc"))
    sequence = ActiveSequence(EngineRequest(prompt_ids, sampling, seed=0), 3 + sampling.max_new_tokens)
    reason = None
    for token_id in tokenizer.convert_tokens_to_ids(RESPONSE):
        sequence.append(SampledToken(token_id, -1.0), weight_version=0)
        if (reason := find_stop_reason(sequence, eos_ids, tokenizer)) is not None:
            break
    return tokenizer.decode(sequence.token_ids[3:]), reason


@pytest.mark.parametrize(
    ("n_new", "stop", "text", "reason"),
    [
        (100, (), "defghijklmnopAction (L/R/S):78", None),
        (100, ("efghijklmnop",), "defghijklmnop", "stop"),  # longer than a few tokens
        (100, ("R/S",), "defghijklmnopAction (L/R/S):", "stop"),  # inside a token
        (100, ("pA",), "defghijklmnopAction (L/R/S):", "stop"),
        (100, (":7",), "defghijklmnopAction (L/R/S):7", "stop"),
        (100, ("bcd", "hi"), "defghi", "stop"),  # a stop string that starts in the prompt does not count
        (5, ("hi",), "defgh", "length"),
        (6, ("hi",), "defghi", "stop"),
    ],
)
def test_stop_strings(
    tiny_tokenizer: PreTrainedTokenizerBase, n_new: int, stop: tuple[str, ...], text: str, reason: StopReason | None
) -> None:
    sampling = SamplingParams(max_new_tokens=n_new, stop=stop)
    assert end_of_response(tiny_tokenizer, sampling) == (text, reason)


def test_every_eos_token_of_model_and_tokenizer_ends_a_response(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    assert [all_eos_ids([4, 5], 6), all_eos_ids(4, 4), all_eos_ids(None, None)] == [{4, 5, 6}, {4}, set()]
    eos_ids = all_eos_ids(tiny_tokenizer.convert_tokens_to_ids(["g", "z"]), tiny_tokenizer.eos_token_id)
    text, reason = end_of_response(tiny_tokenizer, SamplingParams(max_new_tokens=9), eos_ids)
    assert (text, reason) == ("defg", "stop")
