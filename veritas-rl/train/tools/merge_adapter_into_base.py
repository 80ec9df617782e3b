"""Merge a LoRA adapter into its base: `python train/tools/merge_adapter_into_base.py --adapter_model … --output_dir …`.

Calls `skyrl merge adapter` with the flags of older recipes. Given a folder that `merge.sh` wrote, it merges the
`lora_adapter/` inside.
"""

import argparse
import sys
from pathlib import Path

from skyrl_train.entrypoints.cli import main as skyrl


def main() -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base_model", help="base model; defaults to the adapter's base model")
    parser.add_argument("--adapter_model", required=True, help="folder or Hub name of the adapter")
    parser.add_argument("--output_dir", required=True, help="folder to write; it must not exist")
    parser.add_argument("--dtype", default="auto", help="type of the merged weights (default: %(default)s, as stored)")
    args = parser.parse_args()
    inner = Path(args.adapter_model) / "lora_adapter"
    adapter = str(inner) if inner.is_dir() else args.adapter_model
    base = ["--base", args.base_model] if args.base_model else []
    return skyrl(["merge", "adapter", adapter, args.output_dir, "--dtype", args.dtype, *base])


if __name__ == "__main__":
    sys.exit(main())
