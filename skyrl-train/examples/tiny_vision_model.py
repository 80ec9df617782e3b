"""Train a tiny Idefics 3 that sees what is on an image and knows the format of a task, but not how to solve it.

The model has an image encoder of one layer, a connector and a small Llama, all with random weights. An image becomes a
single token.
"""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerBase,
    get_scheduler,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.runtime.validation import validate_prompt
from skyrl_train.dataset.batch import pad_right, pad_tokens
from skyrl_train.entrypoints.tiny import train_tokenizer
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.models.loading import default_device, load_model, load_tokenizer
from skyrl_train.models.logprobs import response_logprobs
from skyrl_train.types import Segment

N_STEPS, BATCH_SIZE = 250, 48
TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Example = tuple[ConversationType, str]
"""A prompt with an image, and a reply."""


def make_tiny_vision_model(
    texts: list[ConversationType],
    draw_example: Callable[[random.Random], Example],
    folder: Path,
    seed: int,
    *,
    image_size: int,
    n_patches: int,
    vocab_size: int = 512,
) -> float:
    """Write the model with its tokenizer and processor. Return the last loss of the warm start in nats per token.

    Args:
        texts: conversations without images, for the tokenizer.
        draw_example: returns a random example for the warm start.
        image_size: width and height of all images in pixels.
        n_patches: patches in a row of an image, and in a column.
        vocab_size: tokens of the tokenizer. More merge longer fixed wordings into single tokens.
    """
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = TEMPLATE
    size = {"longest_edge": image_size}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
    partial = folder.with_name(folder.name + ".partial")  # so an interrupted write is not mistaken for a model
    Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=TEMPLATE).save_pretrained(partial)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Idefics3ForConditionalGeneration(_config(tokenizer, image_size, n_patches)).save_pretrained(partial)
    loss = _warm_start(draw_example, partial, seed)
    partial.rename(folder)
    return loss


def _config(tokenizer: PreTrainedTokenizerBase, image_size: int, n_patches: int) -> Idefics3Config:
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
            "image_size": image_size,
            "patch_size": image_size // n_patches,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
        },
        text_config=text,
        image_token_id=tokenizer.get_vocab()["<image>"],
        scale_factor=n_patches,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )


def _warm_start(draw_example: Callable[[random.Random], Example], folder: Path, seed: int) -> float:
    """Train the model on the replies of examples."""
    model = load_model(str(folder), dtype=torch.float32, device=default_device())
    tokenizer = load_tokenizer(str(folder))
    chat, rng = ChatEncoder(tokenizer), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=10, num_training_steps=N_STEPS)
    for _ in range(N_STEPS):
        segments = [_segment(chat, *draw_example(rng)) for _ in range(BATCH_SIZE)]
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


def _segment(chat: ChatEncoder, prompt: ConversationType, reply: str) -> Segment:
    prompt = validate_prompt((prompt, {}))
    token_ids = chat.prompt_ids(prompt)
    segment = Segment.start(token_ids, chat.find_spans(token_ids, prompt))
    segment.append_sampled(chat.encode(reply), None, None)
    return segment
