"""A language model small enough to train on a laptop in minutes, with a tokenizer trained on its task.

It needs no download, so use it for first runs, examples and tests. It is saved as an ordinary Hugging Face folder.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from skyrl_gym.data.files import Row
from skyrl_gym.runtime.validation import is_conversation
from skyrl_train.dataset.files import read_rows
from skyrl_train.errors import DataError

DEFAULT_TEXT = [{"role": "user", "content": "What is 6 times 7? Answer with a number: 0 1 2 3 4 5 6 7 8 9"}]

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(
    conversations: Iterable[Sequence[Mapping[str, Any]]], vocab_size: int = 512
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer with ChatML turns on the conversations of a task.

    Each digit is a separate token. Text between digits may merge within a line, so that the fixed wording of a task
    becomes a few tokens and sequences stay short. Unknown text is encoded byte by byte.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]|[^0-9\n]+\n|[^0-9\n]+|\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )

    def between_special_tokens() -> Iterator[str]:
        """Yield the text between special tokens. The tokenizer splits at them before it merges."""
        for messages in conversations:
            text = "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)
            yield from filter(None, re.split(f"{re.escape(TURN_START)}|{re.escape(TURN_END)}", text))

    tokenizer.train_from_iterator(between_special_tokens(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def tiny_qwen3(
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    hidden_size: int = 64,
    head_dim: int = 16,
    n_layers: int = 2,
    context_length: int = 512,
) -> Qwen3ForCausalLM:
    """Create a Qwen3 with random weights. The defaults give a few hundred thousand parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=n_layers,
        num_attention_heads=hidden_size // head_dim,
        num_key_value_heads=hidden_size // head_dim,
        head_dim=head_dim,
        max_position_embeddings=context_length,
        tie_word_embeddings=False,
        initializer_range=0.08,  # Qwen3's 0.02 is for widths in the thousands; here it starts too close to zero
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def write_tiny_model(folder: Path, data: str | None, seed: int) -> int:
    """Write a tiny model with a tokenizer trained on a dataset's text. Return its number of parameters.

    Raises:
        DataError: the dataset cannot be read, or a row has no prompt.
    """
    conversations: list[Any] = [_conversation(row) for row in read_rows(data)] if data else [DEFAULT_TEXT]
    for number, conversation in enumerate(conversations):
        if not is_conversation(conversation):
            raise DataError(f"row {number} of {data}: prompt={str(conversation)[:80]!r} is not a list of messages")
    tokenizer = train_tokenizer(conversations)
    model = tiny_qwen3(tokenizer, seed=seed)
    disable_progress_bar()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return model.num_parameters()


def _conversation(row: Row) -> Any:
    """Return the messages of a row of prompts, demonstrations or preferences."""
    if "messages" in row:
        return row["messages"]
    prompt, response = row.get("prompt"), row.get("response", row.get("chosen"))
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and isinstance(response, str):
        return [*prompt, {"role": "assistant", "content": response}]
    return prompt
