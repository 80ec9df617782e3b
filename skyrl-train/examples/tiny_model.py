"""Train a tiny Qwen3 that knows the format of a task but not how to solve it: a language model of random attempts."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_train.entrypoints.tiny import tiny_qwen3, train_tokenizer
from skyrl_train.threads import compute_thread

N_STEPS = 150
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
N_FOR_TOKENIZER = 400


def make_tiny_model(
    conversations: Sequence[ConversationType],
    output_dir: Path,
    seed: int,
    *,
    n_steps: int = N_STEPS,
    context_length: int = 512,
    head_dim: int = 16,
    vocab_size: int = 512,
) -> float:
    """Write tokenizer and model to a new `output_dir`. Return the last loss in nats per token."""
    if output_dir.exists():
        raise ValueError(f"{output_dir} exists already; remove it, or write to another folder")
    tokenizer = train_tokenizer(conversations[:N_FOR_TOKENIZER], vocab_size)
    model = tiny_qwen3(tokenizer, seed=seed, context_length=context_length, head_dim=head_dim)
    loss = train_language_model(model, encode(conversations, tokenizer), seed, n_steps)
    partial = output_dir.with_name(output_dir.name + ".partial")  # so an interrupted write is not mistaken for a model
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    partial.rename(output_dir)
    return loss


def encode(conversations: Sequence[ConversationType], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return token ids (n, L), padded on the right with -100."""
    texts = tokenizer.apply_chat_template(list(conversations), tokenize=False)
    token_ids = [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    return torch.nn.utils.rnn.pad_sequence(token_ids, batch_first=True, padding_value=-100)


def train_language_model(model: PreTrainedModel, token_ids: torch.Tensor, seed: int, n_steps: int) -> float:
    """Train next-token prediction on every token of the conversations. Return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=n_steps // 20, num_training_steps=n_steps)
    generator = torch.Generator().manual_seed(seed)

    def step() -> float:
        batch = token_ids[torch.randint(len(token_ids), (BATCH_SIZE,), generator=generator)]  # (b, L)
        logits = model(input_ids=batch.clamp(min=0), use_cache=False).logits[:, :-1]  # (b, L - 1, V)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    with compute_thread() as compute, trange(n_steps, desc="warm start on random play", disable=None) as progress:
        for _ in progress:
            last_loss = compute.submit(step).result()
            progress.set_postfix(loss=f"{last_loss:.3f}", refresh=False)
    return last_loss
