"""Settings for training a tiny model on Catch on a CPU, and the steps of a run.

Data → warm start on random play → GRPO. Steps with existing results are skipped.
"""

from dataclasses import dataclass
from pathlib import Path
from time import strftime

from examples.catch.catch_dataset import CatchDataset, write_dataset
from examples.catch.env import CatchReward, RewardMode
from examples.catch.players import catch_rate, expected_random_catch_rate, optimal_player
from examples.catch.warm_start import make_model
from skyrl_report.learning_curve import MetricRows
from skyrl_report.metrics_file import read_metrics
from skyrl_report.run_folder import RunFolder
from skyrl_train.dataset.files import read_rows
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import parse_cli

METRIC = "eval/environment/catch_rate"
TRAIN_METRIC = "environment/catch_rate"
N_STEPS = 80

TINY_MODEL = (
    "trainer.train_batch_size=32",
    "trainer.policy_mini_batch_size=8",  # four updates per step
    "generator.n_samples_per_prompt=16",
    "trainer.algorithm.use_kl_loss=true",
    "trainer.algorithm.kl_loss_coef=0.03",  # keeps the probability of all three actions up until every start is solved
    "trainer.algorithm.eps_clip_high=0.28",
    "trainer.policy.optimizer_config.lr=1e-3",
    "trainer.policy.optimizer_config.scheduler=linear",
    "trainer.policy.optimizer_config.num_warmup_steps=20",
    "trainer.policy.optimizer_config.adam_betas=[0.9,0.95]",
    "trainer.policy.optimizer_config.weight_decay=0",
    f"trainer.max_training_steps={N_STEPS}",
)
"""Settings for training the tiny model. `run_catch.sh` uses them too."""

RUN_SETTINGS = (
    "generator.batched=true",
    "generator.max_turns=5",
    "generator.sampling_params.max_generate_length=1",
    "environment.skyrl_gym.max_env_workers=0",
    "trainer.eval_interval=10",
    "trainer.eval_batch_size=512",
    "trainer.ckpt_interval=20",
    "trainer.max_ckpts_to_keep=1",
    "trainer.hf_save_interval=1000",
    "trainer.logger=[jsonl,tensorboard]",
    "trainer.project_name=catch",
)


@dataclass(frozen=True)
class Baselines:
    """Validation catch rates to compare the model with."""

    optimal: float
    chance: float

    def as_lines(self) -> dict[str, float]:
        """Return the baselines by label, for a plot."""
        return {"optimal player": self.optimal, "random play": self.chance}


@dataclass(frozen=True)
class CatchRun:
    """A run of the recipe under `output_dir`/catch."""

    output_dir: Path
    reward_mode: RewardMode
    seed: int
    n_steps: int = N_STEPS
    label: str = ""  # distinguishes runs with different settings
    overrides: tuple[str, ...] = ()  # overrides of the recipe, e.g. ("trainer.algorithm.advantage_estimator=rloo",)
    experiment: type[RLExperiment] = RLExperiment

    @property
    def name(self) -> str:
        name = f"{self.reward_mode}-seed{self.seed}"
        return f"{self.label}-{name}" if self.label else name

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.output_dir / "catch" / self.name)

    @property
    def data_dir(self) -> Path:
        return self.output_dir / "catch" / "data" / self.reward_mode

    @property
    def model_dir(self) -> Path:
        return self.output_dir / "catch" / "models" / f"tiny-qwen3-seed{self.seed}"

    @property
    def command(self) -> str:
        """The command of the run."""
        return f"make {'catch' if self.reward_mode == 'shaped' else 'catch-compare'} SEED={self.seed}"

    @property
    def required_share(self) -> float:
        """Fraction of the optimal player's catch rate that the model must reach."""
        return {"shaped": 0.90, "episodic": 0.75}[self.reward_mode]

    def write_data(self) -> None:
        """Write train.parquet, then validation.parquet."""
        print(write_dataset(CatchDataset(reward=CatchReward(mode=self.reward_mode)), self.data_dir))

    def write_model(self) -> None:
        """Write the warm-started model."""
        make_model(self.data_dir / "train.parquet", self.model_dir, self.seed)

    def prepare(self) -> None:
        """Write the dataset and the warm-started model if missing. Rename the folder of an earlier finished run."""
        if not (self.data_dir / "validation.parquet").is_file():  # the file written last
            self.write_data()
        if not self.model_dir.is_dir():
            self.write_model()
        if self.metrics() and self.metrics()[-1]["step"] >= self.n_steps:
            kept = self.folder.path.with_name(f"{self.name}-before-{strftime('%Y%m%d-%H%M%S')}")
            self.folder.path.rename(kept)
            print(f"An earlier run is finished; it is now in {kept}")

    def train(self) -> None:
        """Train from the start, or resume an interrupted run."""
        run_overrides = [
            f"data.train_data=['{self.data_dir / 'train.parquet'}']",
            f"data.val_data=['{self.data_dir / 'validation.parquet'}']",
            f"trainer.policy.model.path='{self.model_dir}'",
            f"trainer.output_dir='{self.output_dir}'",
            f"trainer.run_name={self.name}",
            f"trainer.max_training_steps={self.n_steps}",
            f"trainer.seed={self.seed}",
        ]
        self.experiment(parse_cli([*TINY_MODEL, *RUN_SETTINGS, *run_overrides, *self.overrides])).run()

    def metrics(self) -> MetricRows:
        """Return the metrics that the run has logged so far."""
        return read_metrics(self.folder.metrics) if self.folder.metrics.exists() else []

    def catch_rates(self) -> tuple[float, float]:
        """Return the catch rates on the validation set before and after training."""
        values = [row[METRIC] for row in self.metrics() if METRIC in row]
        return values[0], values[-1]

    def baselines(self) -> Baselines:
        """Measure the baselines on the validation set."""
        rows = read_rows(str(self.data_dir / "validation.parquet"))
        return Baselines(catch_rate(rows, optimal_player), expected_random_catch_rate(rows))


if __name__ == "__main__":
    print("\n".join(TINY_MODEL))
