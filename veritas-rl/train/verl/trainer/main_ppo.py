"""verl's `python -m verl.trainer.main_ppo` in the folder `train`, run by `skyrl verl`."""

import sys

from skyrl_train.compat.cli import main

if __name__ == "__main__":
    sys.exit(main(["verl", "main_ppo", *sys.argv[1:]]))
