from pathlib import Path

from data_processing import generate_dataset


def generate(path: Path, n_tasks: int, *flags: str) -> int:
    """Generate puzzles with answers, and return the exit status of the command."""
    return generate_dataset.main(["--env", "lgc-v2", "--num-samples", str(n_tasks), "--output", str(path), *flags])
