"""verl's `python -m verl.trainer.fsdp_sft_trainer` in the folder `train`, run by `skyrl verl`."""

import sys

from skyrl_train.compat.cli import main

if __name__ == "__main__":
    sys.exit(main(["verl", "fsdp_sft_trainer", *sys.argv[1:]]))
