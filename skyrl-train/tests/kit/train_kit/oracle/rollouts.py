"""Rollouts as lists of tokens."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

Floats = list[float]


@dataclass(frozen=True)
class OracleRow:
    """One row of tokens: a prompt, then sampled tokens and observations."""

    prompt_ids: list[int]
    response_ids: list[int]
    was_sampled: list[bool]
    rewards: Floats
    logprobs: Floats | None = None
    """Log-probs from the engine for the response tokens."""

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def sampled_positions(self) -> list[int]:
        """Positions of the sampled tokens in `token_ids`."""
        return [len(self.prompt_ids) + i for i, sampled in enumerate(self.was_sampled) if sampled]


@dataclass(frozen=True)
class OracleTrajectory:
    """One rollout; it has several rows if its history was rewritten between turns."""

    prompt_uid: str
    rows: list[OracleRow]
    greedy_reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Sum of all rewards, including those of unsampled tokens."""
        return sum(sum(row.rewards) for row in self.rows)

    @property
    def turns(self) -> list[Floats]:
        """Rewards of the sampled tokens of each turn."""
        return [turn for row in self.rows for turn in _turns(row)]


def _turns(row: OracleRow) -> Iterator[Floats]:
    """Yield the rewards of each stretch of sampled tokens."""
    turn: Floats = []
    for reward, sampled in zip(row.rewards, row.was_sampled, strict=True):
        if sampled:
            turn.append(reward)
        elif turn:
            yield turn
            turn = []
    if turn:
        yield turn


def random_rollouts(several_rows: bool, n_tokens: int, seed: int = 0) -> list[OracleTrajectory]:
    """Generate four prompts of up to four rollouts of one to three turns, with one row per turn or one row in all.

    The first prompt has one masked trajectory and one masked row of another trajectory; the rewards of the second
    prompt are equal; the third prompt has one rollout.
    """
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(3, n_tokens) for _ in range(rng.randint(low, high))]

    rollouts = []
    for prompt, n_samples in enumerate((4, 2, 1, 3)):
        prompt_ids = ids(2, 6)
        for sample in range(n_samples):
            rows: list[OracleRow] = []
            for turn in range(rng.randint(1, 3)):
                reply, observation = ids(1, 4), ids(1, 4)
                rewards = [rng.choice([-0.5, 0.0, 0.5]) for _ in reply]
                rewards[-1] += rng.choice([-1.0, 0.0, 1.0])
                sampled = [not (prompt == 0 and (sample == 0 or (sample, turn) == (1, 0)))] * len(reply)
                if prompt == 1:
                    rewards = [0.0] * len(reply)
                if rows and not several_rows:
                    last, gap = rows.pop(), len(observation)
                    row = OracleRow(
                        prompt_ids,
                        last.response_ids + observation + reply,
                        last.was_sampled + [False] * gap + sampled,
                        last.rewards + [0.0] * gap + rewards,
                    )
                else:
                    row = OracleRow(prompt_ids + (observation if rows else []), reply, sampled, rewards)
                rows.append(row)
            components = {"answer": rng.choice([0.0, 1.0]), "format": rng.choice([0.0, 0.25, 0.5])}
            rollouts.append(OracleTrajectory(f"p{prompt}", rows, rng.choice([-0.5, 0.25]), components))
    return rollouts
