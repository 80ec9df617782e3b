"""Train on products as a SkyRL script does: in a Ray task that registers the environment.

python -m examples.multiply.main_multiply data.train_data="['$HOME/data/multiply/train.parquet']" …
"""

import hydra
import ray
from omegaconf import DictConfig

from skyrl_gym.envs import register
from skyrl_train.compat.skyrl.cluster import initialize_ray
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import config_dir, validate_cfg


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig) -> None:
    """Register the environment in this process, and train."""
    register(id="multiply", entry_point="examples.multiply.env:MultiplyEnv")
    RLExperiment(cfg).run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    """Run the command line, with overrides `key=value`."""
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
