"""A model's greedy answers: `python -m examples.sft.answer MODEL ROWS.jsonl` also counts the correct ones."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from skyrl_train.dataset.files import read_rows
from skyrl_train.models.loading import load_tokenizer


def main(argv: list[str] | None = None) -> int:
    """Print each answer. Return the number of correct answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows")
    arguments = parser.parse_args(argv)
    tokenizer = load_tokenizer(str(arguments.model))
    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    rows, n_right = read_rows(arguments.rows), 0
    for row in rows:
        messages = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            reply = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        is_right = tokenizer.decode(reply) == row["response"] + tokenizer.eos_token
        n_right += is_right
        print(f"{'right' if is_right else 'wrong'}  {row['prompt']}  {tokenizer.decode(reply)}")
    print(f"{n_right} of {len(rows)} answers are right")
    return n_right


if __name__ == "__main__":
    main()
