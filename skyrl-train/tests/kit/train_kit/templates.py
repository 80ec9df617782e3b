"""Chat templates with the structure of published models, each with a tokenizer of the model's kind.

They are written anew and left at what places turns: headers, ends, thoughts, trimmed contents, and rewritten histories.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXT = [
    "What is 2 plus 2? It is 4. Yes, the answer is four.\n\nHello. A B C D",
    "The capital of France is Paris. <think>\n\n</think>\n\nuser assistant system model",
] * 4


@dataclass(frozen=True)
class Family:
    """A chat template, and what it makes of an assistant's reply."""

    template: str
    reply: str  # text that the model has to write, with the content as "{}"
    specials: list[str]
    eos: str = "</s>"
    kind: str = "bytes"  # of tokenizer: "bytes", or the `prepend_scheme` of SentencePiece
    variables: dict[str, Any] = field(default_factory=dict)
    call: str | None = None  # text that the model has to write to call `add` with {"a": 1}; None: it is not written
    thought: str | None = None  # text that the model has to write with the thought "Hm" and the content "It is 4."

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Train the tokenizer."""
        return train_tokenizer(self.specials, self.eos, self.kind, self.template)


def train_tokenizer(specials: list[str], eos: str, kind: str, template: str) -> PreTrainedTokenizerBase:
    """Train a tokenizer of some hundred tokens.

    `kind` is "bytes" for the byte-level BPE of GPT-2, Llama 3 and Qwen. Of SentencePiece, "first" puts a space before a
    text (Mistral, Phi-3), "always" before each text between special tokens (Llama 2), and "never" nowhere (Gemma).
    """
    tokenizer = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>", byte_fallback=kind != "bytes"))
    tokens = [eos, *(token for token in specials if token != eos)]
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        scheme = "always" if kind == "always" else "first"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        strip = [] if kind == "never" else [decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        alphabet = sorted({*"".join(TEXT), "▁"} - {" ", "\n"})
        tokens = ["<unk>", *tokens, *(f"<0x{byte:02X}>" for byte in range(256))]
    size = 256 + len(tokens) + 200
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=size, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False),
    )
    if kind == "never":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    if kind == "always":  # as Llama 2's files say it
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=eos, chat_template=template)


def turns(user: str, assistant: str, header: str, start: str = "") -> str:
    """Return a template of a text for each role, with "@" for the content. Only the assistant's role has its own."""
    write = {"u": user, "a": assistant, "h": header, "s": start}
    parts = {name: text.replace("@", "{{ m['content'] }}") for name, text in write.items()}
    return (
        f"{parts['s']}{{% for m in messages %}}{{% if m['role'] == 'assistant' %}}{parts['a']}"
        f"{{% else %}}{parts['u']}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{parts['h']}{{% endif %}}"
    )


def read_family(entry: dict[str, Any]) -> Family:
    """Create a family from its entry in families.yaml, which has a template or a text for each role."""
    parts = [entry.pop(name, "") for name in ("user", "assistant", "header", "start")]
    return Family(**{"template": turns(*parts), **entry})


FAMILIES = {
    name: read_family(entry)
    for name, entry in yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8")).items()
}
THINKS = "\n</think>\n\n{}"  # closes the thought that the header opens
