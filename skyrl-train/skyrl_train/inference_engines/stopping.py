"""When a response ends."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from skyrl_train.inference_engines.base import StopReason
from skyrl_train.inference_engines.sequence import ActiveSequence


def all_eos_ids(of_model: int | list[int] | None, of_tokenizer: int | None) -> frozenset[int]:
    """The tokens that end a sequence: those that the model's generation config lists, and the tokenizer's."""
    listed = of_model if isinstance(of_model, list) else [of_model]
    return frozenset(i for i in [*listed, of_tokenizer] if i is not None)


class StopRules:
    """The rules of one model and its tokenizer."""

    def __init__(self, eos_ids: frozenset[int], tokenizer: PreTrainedTokenizerBase) -> None:
        self._eos_ids = eos_ids
        self._tokenizer = tokenizer

    def stop_reason(self, sequence: ActiveSequence) -> StopReason | None:
        """Why the response ends with its last token, None if it goes on."""
        sampling, n_sampled = sequence.sampling, len(sequence.logprobs)
        last = sequence.token_ids[-1]
        if last in self._eos_ids and not sampling.ignore_eos:
            return "stop"
        if last in sampling.stop_token_ids:
            return "stop"
        if sampling.stop and n_sampled >= sampling.min_new_tokens:
            # A token is a byte or more, and some tokenizers drop the space that a text begins with.
            n_tail = min(max(len(stop.encode()) for stop in sampling.stop) + 1, n_sampled)
            before, tail = (self._tokenizer.decode(sequence.token_ids[-n_tail:end]) for end in (-1, None))
            if any(stop in tail and stop not in before for stop in sampling.stop):
                return "stop"
        return "length" if len(sequence.token_ids) >= sequence.max_tokens else None
