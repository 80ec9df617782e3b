"""A tiny vision-language model that sees the board and knows the letters of Catch, but not how to play.

It is an Idefics 3: an image encoder, a connector and a small Llama with random weights. A short training teaches it to
describe a board ("ball 3,0 paddle 5"), and to answer L, R or S at random when it is asked to play. It sees no rewards
and no good play.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerBase,
    get_scheduler,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from examples.catch.game import MOVES, CatchState
from examples.catch_pixels.env import CELL, RULES, CatchPixelsEnv, draw
from skyrl_gym.runtime.validation import validate_prompt
from skyrl_train.dataset.batch import pad_right, pad_tokens
from skyrl_train.entrypoints.tiny import train_tokenizer
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.models.loading import default_device, load_model, load_tokenizer
from skyrl_train.models.logprobs import response_logprobs
from skyrl_train.types import Segment

BOARD = 7 * CELL
N_STEPS, BATCH_SIZE = 250, 48
DESCRIBED = 0.8
"""Share of examples that describe a board."""

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]


def make_model(rows: Sequence[dict[str, Any]], folder: Path, seed: int) -> float:
    """Write the model with its tokenizer and processor. Return the last loss in nats per token."""
    turn = [{"role": "system", "content": RULES}, {"role": "user", "content": "Action:"}]
    tokenizer = train_tokenizer(
        [
            [*turn, {"role": "assistant", "content": text}]
            for text in [*MOVES, "Describe:", "ball ", " paddle ", ",", *"0123456789"]
        ]
        * 2
    )
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = TEMPLATE
    size = {"longest_edge": BOARD}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
    partial = folder.with_name(folder.name + ".partial")  # so an interrupted write is not mistaken for a model
    Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=TEMPLATE).save_pretrained(partial)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Idefics3ForConditionalGeneration(_config(tokenizer)).save_pretrained(partial)
    loss = _warm_start(rows, partial, seed)
    partial.rename(folder)
    return loss


def _config(tokenizer: PreTrainedTokenizerBase) -> Idefics3Config:
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
    }
    return Idefics3Config(
        vision_config={
            "image_size": BOARD,
            "patch_size": CELL,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
        },
        text_config=text,
        image_token_id=tokenizer.get_vocab()["<image>"],
        scale_factor=7,  # the 7 x 7 patches of a board become one token
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )


def _warm_start(rows: Sequence[dict[str, Any]], folder: Path, seed: int) -> float:
    """Train the model to describe boards and to play at random."""
    model, tokenizer = (
        load_model(str(folder), dtype=torch.float32, device=default_device()),
        load_tokenizer(str(folder)),
    )
    chat, rng = ChatEncoder(tokenizer), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=10, num_training_steps=N_STEPS)
    for _ in range(N_STEPS):
        segments = [_example(chat, row, rng) for row in rng.choices(rows, k=BATCH_SIZE)]
        sequences, mask = pad_tokens([(s.token_ids, s.n_prompt) for s in segments], tokenizer.pad_token_id)
        loss_mask = pad_right([s.loss_mask for s in segments])
        images = [s.images for s in segments]
        scores = response_logprobs(model, sequences, mask, loss_mask, 1.0, images=images)
        loss = -scores.logprobs.sum() / loss_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    return loss.item()


def _example(chat: ChatEncoder, row: dict[str, Any], rng: random.Random) -> Segment:
    """Return a board with its description or a random move."""
    env = CatchPixelsEnv({}, row)
    for _ in range(rng.randrange(env.max_turns)):
        env.step(rng.choice(list(MOVES)))
    prompt, _ = env.init([])
    answer = rng.choice(list(MOVES))
    if rng.random() < DESCRIBED:
        prompt = [
            {
                "role": "user",
                "content": [{"type": "image", "image": draw(env.state)}, {"type": "text", "text": "Describe:"}],
            }
        ]
        answer = describe(env.state)
    prompt = validate_prompt((prompt, {}))
    token_ids = chat.prompt_ids(prompt)
    segment = Segment.start(token_ids, chat.find_spans(token_ids, prompt))
    segment.append_sampled(chat.encode(answer), None, None)
    return segment


def describe(state: CatchState) -> str:
    """Return the positions on a board, e.g. "ball 3,0 paddle 5"."""
    return f"ball {state.ball_x},{state.ball_y} paddle {state.paddle_x}"
