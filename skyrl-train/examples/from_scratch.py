"""GRPO on Catch, from top to bottom in one file: `python -m examples.from_scratch`.

A tiny language model learns to catch a falling ball, in about a minute on two CPU cores. A training step is
prompts → rollouts → advantages → update → sync, as in `Trainer.train`. Trainer, generator, learner, worker, reference
model, checkpoints and report are left out. From the same rollouts, the update produces the weights of the real trainer.
Shapes: B rollouts in a step, b in a mini-batch, L tokens in the longest, n trained tokens, V tokens in the vocabulary.
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.catch.env import CatchEnv
from examples.catch.recipe import CatchRun
from skyrl_gym.data.files import Row
from skyrl_train.algorithms.advantages import grpo
from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.dataset.files import read_rows
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.models.loading import load_model, load_tokenizer
from skyrl_train.threads import compute_thread
from skyrl_train.weight_sync import SyncPlan, send

N_STEPS = 40
N_PROMPTS = 16  # per step: trainer.train_batch_size
GROUP_SIZE = 16  # rollouts of a prompt: generator.n_samples_per_prompt
MINI_BATCH = 4 * GROUP_SIZE  # rollouts of an optimizer step: trainer.policy_mini_batch_size, in prompts
ALGORITHM = AlgorithmConfig(eps_clip_high=0.28)  # trainer.algorithm


@dataclass
class Rollout:
    """One game as tokens. The trainer's `Trajectory` also has log-probs, a stop reason, and several segments."""

    group: str  # the prompt: rollouts of one group are compared
    tokens: list[int] = field(default_factory=list)  # [l] prompt, reply, observation, reply, …
    loss_mask: list[int] = field(default_factory=list)  # [l] 1 on sampled tokens
    rewards: list[float] = field(default_factory=list)  # [l] each turn's reward, on its last sampled token
    caught: bool = False

    def append(self, tokens: list[int], is_sampled: bool, reward: float = 0.0) -> None:
        """Append tokens, with the reward on the last one."""
        self.tokens += tokens
        self.loss_mask += [int(is_sampled)] * len(tokens)
        self.rewards += [0.0] * (len(tokens) - 1) + [reward]


async def play(engine: PackedEngine, tokenizer: PreTrainedTokenizerBase, row: Row, group: str, seed: int) -> Rollout:
    """Play one game. The trainer's agent loop adds timeouts, retries and limits on length."""
    env, rollout, session = CatchEnv({}, row), Rollout(group), f"{group}-{seed}"
    sampling = SamplingParams(max_new_tokens=1)  # at temperature 1
    (messages, _), end_of_turn, done = env.init(row["prompt"]), "", False
    while not done:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        rollout.append(tokenizer.encode(f"{end_of_turn}{text}"), is_sampled=False)
        (reply,) = await engine.generate([EngineRequest(list(rollout.tokens), sampling, seed, session)])
        step = env.step(str(tokenizer.decode(reply.token_ids)))
        assert step["reward"] is not None  # with other environments it may be, and the trainer excludes the rollout
        rollout.append(reply.token_ids, is_sampled=True, reward=step["reward"])  # their text is never tokenized again
        messages, done = step["observations"], step["done"]
        # The template ends the model's turn, unless the model did so. `ChatEncoder` finds this out for any template.
        end_of_turn = "\n" if reply.token_ids[-1] == tokenizer.eos_token_id else f"{tokenizer.eos_token}\n"
    await engine.end_session(session)
    rollout.caught = step["metadata"]["caught"]
    return rollout


def trained_logprobs(model: PreTrainedModel, tokens: torch.Tensor, is_trained: torch.Tensor) -> torch.Tensor:
    """Return the log-probs (n,) of the trained tokens. The trainer also computes common prefixes only once."""
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state  # (b, L, H), padded on the right
    logits = model.lm_head(hidden[:, :-1][is_trained[:, 1:]])  # (n, V): each token is predicted from the one before it
    return logits.log_softmax(dim=-1).gather(-1, tokens[is_trained][:, None])[:, 0]  # (n,)


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollouts: Sequence[Rollout]) -> None:
    """Take one optimizer step per mini-batch. The trainer's workers also split it into micro-batches, and over GPUs."""
    columns = zip(*((r.tokens, r.loss_mask, r.rewards) for r in rollouts), strict=True)
    tokens, mask, rewards = (pad_sequence([torch.tensor(x) for x in column], batch_first=True) for column in columns)
    advantages, _ = grpo(rewards, mask, [r.group for r in rollouts])  # (B, L), as tokens, mask and rewards
    mini_batches = [(tokens[i], mask[i] > 0, advantages[i]) for i in torch.arange(len(rollouts)).split(MINI_BATCH)]
    with torch.no_grad():  # before the first optimizer step: each one moves the policy away from these log-probs
        old_logprobs = [trained_logprobs(model, ids, is_trained) for ids, is_trained, _ in mini_batches]
    for (ids, is_trained, advantage), old in zip(mini_batches, old_logprobs, strict=True):
        logprobs = trained_logprobs(model, ids, is_trained)  # (n,)
        loss, _ = clipped_surrogate(logprobs, old, advantage[is_trained], ALGORITHM, torch.ones_like(old), None)  # (n,)
        loss.mean().backward()  # the mean over tokens: trainer.algorithm.loss_reduction=token_mean
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()


async def train(run: CatchRun, n_steps: int) -> tuple[float, float]:
    """Train on the games of `run`. Return the catch rates on its validation set before and after."""
    tokenizer = load_tokenizer(str(run.model_dir))
    model = load_model(str(run.model_dir), dtype=torch.float32, device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(run.seed)
    train_rows, val_rows = (read_rows(str(run.data_dir / f"{split}.parquet")) for split in ("train", "validation"))
    with compute_thread() as thread:  # the engine and the update take turns in one thread, with all cores
        engine = PackedEngine(
            model, tokenizer, max_num_seqs=512, max_num_batched_tokens=8192, max_cache_bytes=1 << 30, executor=thread
        )

        async def play_all(rows: Sequence[Row], n_samples: int = 1) -> list[Rollout]:
            jobs = [(row, str(draw)) for draw, row in enumerate(rows) for _ in range(n_samples)]
            games = (play(engine, tokenizer, *job, rng.getrandbits(63)) for job in jobs)
            return await asyncio.gather(*games)  # the engine batches the requests of all games

        before = fmean(game.caught for game in await play_all(val_rows))
        for step in range(1, n_steps + 1):
            rollouts = await play_all(rng.sample(train_rows, N_PROMPTS), GROUP_SIZE)
            await asyncio.wrap_future(thread.submit(update, model, optimizer, rollouts))
            # The engine has the policy's own tensors, so the sync sends nothing. It makes the engine drop the keys and
            # values of the old weights. To an engine in another process, a plan with another transport sends them.
            plan = SyncPlan(step, "shared", "policy")
            send(plan, model.named_parameters())
            await engine.receive_weights(plan)
            print(f"step {step:3}: catch rate {fmean(game.caught for game in rollouts):6.1%}", flush=True)
        after = fmean(game.caught for game in await play_all(val_rows))
        await engine.close()
    return before, after


def main(argv: Sequence[str] | None = None) -> None:
    """Make the data and the model of `make catch`, train, and print the catch rates."""
    parser = argparse.ArgumentParser(prog="python -m examples.from_scratch", description=__doc__.partition(":")[0])
    parser.add_argument("--seed", type=int, default=42, help="seed of the model, the prompts and sampling")
    parser.add_argument("--steps", type=int, default=N_STEPS, help="training steps")
    args = parser.parse_args(argv)
    run = CatchRun(Path("outputs"), "shaped", args.seed, label="from-scratch")
    run.prepare()
    before, after = asyncio.run(train(run, args.steps))
    print(f"Catch rate on the validation set: {before:.1%} before, {after:.1%} after {args.steps} steps")


if __name__ == "__main__":
    main()
