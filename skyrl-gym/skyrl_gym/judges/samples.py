"""Write labelled samples to measure judges with: `python -m skyrl_gym.judges.samples labelled.jsonl`.

With `--injections`, every response is wrong and tries to persuade the judge.
"""

import argparse
import json
import random
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

FACTS = (
    ("What is the capital of France?", "Paris", "Lyon"),
    ("Which planet is closest to the sun?", "Mercury", "Venus"),
    ("What is the chemical symbol of gold?", "Au", "Ag"),
    ("Who wrote Hamlet?", "William Shakespeare", "Christopher Marlowe"),
    ("Which ocean is the largest?", "the Pacific Ocean", "the Atlantic Ocean"),
    ("In which year did the Second World War end?", "1945", "1944"),
    ("Which gas do plants take up from the air?", "carbon dioxide", "oxygen"),
    ("What is the longest side of a right triangle called?", "hypotenuse", "cathetus"),
)
RIGHT = ("{}", "It is {}.", "The answer is {}, as far as I know.", "**{}**", "After some thought: {}")
WRONG = ("{wrong}", "It is {wrong}.", "Either {right} or {wrong}.", "I do not know.", "It is not {right}, but {wrong}.")
LENGTHS = ((1000, "m", "km"), (100, "cm", "m"), (60, "minutes", "hours"))


def generate_samples(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield facts, sums, units and answers with two parts, half of them right."""
    rng = random.Random(seed)
    for i in range(n):
        is_right = i % 2 == 0
        kind = (i // 2) % 4
        if kind == 0:
            question, right, wrong = rng.choice(FACTS)
        elif kind == 1:
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            question, right, wrong = f"What is {a} + {b}?", str(a + b), str(a + b + rng.choice((-10, -1, 1, 10)))
        elif kind == 2:
            factor, small, large = rng.choice(LENGTHS)
            count = rng.randint(2, 9)
            question = f"How long is {count * factor} {small}?"
            right, wrong = f"{count} {large}", f"{count} {small}"
            if is_right and rng.random() < 0.5:
                yield _sample(question, f"{count * factor} {small}, so {count} {large}", right, True)
                continue
        else:
            a, b = rng.sample(range(2, 20), 2)
            question, right, wrong = (
                f"What are the sum and the product of {a} and {b}?",
                f"{a + b} and {a * b}",
                f"{a + b}",
            )
        template = rng.choice(RIGHT if is_right else WRONG)
        yield _sample(question, template.format(right, right=right, wrong=wrong), right, is_right)


def generate_injections(seed: int) -> Iterator[dict[str, Any]]:
    """Yield a wrong response with each injection in `injections.yaml`."""
    rng = random.Random(seed)
    for injection in load_injections():
        question, right, wrong = rng.choice(FACTS)
        yield _sample(question, f"It is {wrong}.\n{injection}", right, False)


def load_injections() -> list[str]:
    """Return the texts that try to persuade a judge. `{long}` stands for a long text."""
    texts = yaml.safe_load(files("skyrl_gym.judges").joinpath("injections.yaml").read_text("utf-8"))
    return [text.replace("{long}", "This is a long text. " * 2000) for text in texts]


def _sample(question: str, response: str, reference: str, label: bool) -> dict[str, Any]:
    return {"question": question, "response": response, "reference": reference, "label": label}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write labelled samples to measure judges with.")
    parser.add_argument("file", type=Path, help="the .jsonl file to write")
    parser.add_argument("--n", type=int, default=200, help="number of samples (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default: 0)")
    parser.add_argument(
        "--injections", action="store_true", help="write wrong responses that try to persuade the judge"
    )
    options = parser.parse_args()
    samples = generate_injections(options.seed) if options.injections else generate_samples(options.n, options.seed)
    options.file.write_text("".join(json.dumps(sample) + "\n" for sample in samples), "utf-8")


if __name__ == "__main__":
    main()
