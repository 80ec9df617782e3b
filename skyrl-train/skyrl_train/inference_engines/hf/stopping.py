"""When a response ends."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.base import StopReason
from skyrl_train.inference_engines.hf.sequence import Sequence


class StopRules:
    """The rules of one model and its tokenizer."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        ids = model.generation_config.eos_token_id if model.generation_config is not None else None
        listed = ids if isinstance(ids, list) else [ids]
        self.eos_ids = frozenset(i for i in [*listed, tokenizer.eos_token_id] if i is not None)
        self._tokenizer = tokenizer

    def stop_reason(self, sequence: Sequence) -> StopReason | None:
        """Why the response ends with its last token, None if it goes on."""
        sampling, n_sampled = sequence.sampling, len(sequence.logprobs)
        last = sequence.token_ids[-1]
        if last in self.eos_ids and not sampling.ignore_eos:
            return "stop"
        if last in sampling.stop_token_ids:
            return "stop"
        if sampling.stop and n_sampled >= sampling.min_new_tokens:
            # A token is a byte or more. One that goes on after the end of a stop string ends the text all the same.
            n_tail = min(max(len(stop.encode()) for stop in sampling.stop) + 1, n_sampled)
            tail = self._tokenizer.decode(sequence.token_ids[-n_tail:])
            if any(stop in tail for stop in sampling.stop):
                return "stop"
        return "length" if len(sequence.token_ids) >= sequence.max_tokens else None
