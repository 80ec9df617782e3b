"""Chat templates with the structure of published models, each with a tokenizer of the model's kind.

They are written anew and left at what places turns: headers, ends, thoughts, trimmed contents, and rewritten histories.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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


IM = ["<|im_start|>", "<|im_end|>"]
CHATML = turns(
    "<|im_start|>{{ m['role'] }}\n@<|im_end|>\n",
    "<|im_start|>assistant\n@<|im_end|>\n",
    "<|im_start|>assistant\n",
)
ANSWER = "{% set c = m['content'].split('</think>')[-1].lstrip('\\n') %}"  # the content without its thought
QWEN3 = (
    "{% for m in messages %}{% if m['role'] != 'assistant' %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% else %}"
    + ANSWER
    + "<|im_start|>assistant\n{% if loop.last or not loop.nextitem %}<think>\n"
    "{{ m['content'].split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m['content'] }}\n"
    "</think>\n\n{% endif %}{{ c }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA3 = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA3_HEADER = "<|start_header_id|>%s<|end_header_id|>\n\n"
LLAMA3_TURN = LLAMA3_HEADER + "{{ m['content'] | trim }}<|eot_id|>"
GEMMA = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"]
HARMONY_TEMPLATE = (
    "<|start|>system<|message|>You are a model.<|end|>{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m['content'] }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GLM = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<think>", "</think>", "<|endoftext|>"]
COMMAND = ["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"]
R1 = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]
PHI = ["<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"]
THINKS = "\n</think>\n\n{}"  # closes the thought that the header opens

FAMILIES = {
    "chatml": Family(CHATML, "{}<|im_end|>", IM, "<|im_end|>"),
    "chatml on sentencepiece (internlm2)": Family(CHATML, "{}<|im_end|>", IM, "<|im_end|>", "first"),
    "qwen2.5": Family(
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}" + CHATML,
        *("{}<|im_end|>", IM, "<|im_end|>"),
    ),
    "qwen3": Family(QWEN3, "<think>\n\n</think>\n\n{}<|im_end|>", IM, "<|im_end|>"),
    "qwen3 without thinking": Family(QWEN3, "{}<|im_end|>", IM, "<|im_end|>", variables={"enable_thinking": False}),
    "qwq": Family(
        CHATML.replace("{{ m['content'] }}<|im_end|>\n{% else", ANSWER + "{{ c }}<|im_end|>\n{% else").removesuffix(
            "{% endif %}"
        )
        + "<think>\n{% endif %}",
        *(THINKS + "<|im_end|>", IM, "<|im_end|>"),
    ),
    "r1-distill": Family(
        turns("<｜User｜>@", ANSWER + "<｜Assistant｜>{{ c }}<｜end▁of▁sentence｜>", "<｜Assistant｜><think>\n", R1[0]),
        *(THINKS + "<｜end▁of▁sentence｜>", R1, R1[1]),
    ),
    "deepseek-v3.1": Family(
        turns(
            "<｜User｜>@",
            ANSWER + "<｜Assistant｜></think>{{ c }}<｜end▁of▁sentence｜>",
            "<｜Assistant｜></think>",
            R1[0],
        ),
        *("{}<｜end▁of▁sentence｜>", R1, R1[1]),
    ),
    "deepseek-v3.1, thinking": Family(
        turns(
            "<｜User｜>@",
            ANSWER + "<｜Assistant｜></think>{{ c }}<｜end▁of▁sentence｜>",
            "<｜Assistant｜><think>",
            R1[0],
        ),
        *("</think>{}<｜end▁of▁sentence｜>", R1, R1[1]),
    ),
    "llama 2": Family(turns("<s>[INST] @ [/INST]", " @ </s>", ""), " {} </s>", ["<s>"], kind="always"),
    "vicuna": Family(turns("USER: @ ", "ASSISTANT: @</s>", "ASSISTANT:"), " {}</s>", [], kind="always"),
    "alpaca": Family(
        turns("### Instruction:\n@\n\n", "### Response:\n@</s>\n\n", "### Response:\n"), "{}</s>", [], kind="always"
    ),
    "mistral v0.3": Family(
        turns("[INST] @[/INST]", " @</s>", "", "<s>"), " {}</s>", ["<s>", "[INST]", "[/INST]"], kind="first"
    ),
    "mistral v7": Family(turns("[INST]@[/INST]", "@</s>", "", "<s>"), "{}</s>", ["<s>", "[INST]", "[/INST]"]),
    "magistral": Family(
        turns("[INST]@[/INST]", "@</s>", "[THINK]\n", "<s>"),
        *("\n[/THINK]\n\n{}</s>", ["<s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]"]),
    ),
    "zephyr": Family(
        turns("<|{{ m['role'] }}|>\n@</s>\n", "<|assistant|>\n@</s>\n", "<|assistant|>\n"), "{}</s>", [], kind="first"
    ),
    "llama 3": Family(
        turns(LLAMA3_TURN % "{{ m['role'] }}", LLAMA3_TURN % "assistant", LLAMA3_HEADER % "assistant", LLAMA3[0]),
        *("{}<|eot_id|>", LLAMA3, "<|eot_id|>"),
    ),
    "llama 3.2, with the date": Family(
        turns(
            LLAMA3_TURN % "{{ m['role'] }}",
            LLAMA3_TURN % "assistant",
            LLAMA3_HEADER % "assistant",
            "<|begin_of_text|>Today Date: {{ strftime_now('%d %b %Y') }}",
        ),
        *("{}<|eot_id|>", LLAMA3, "<|eot_id|>"),
    ),
    "phi-3": Family(
        turns("<|user|>\n@<|end|>\n", "<|assistant|>\n@<|end|>\n", "<|assistant|>\n"),
        *("{}<|end|>", PHI, "<|end|>", "always"),
    ),
    "phi-3.5": Family(
        turns("<|user|>\n@<|end|>\n", "<|assistant|>\n@<|end|>\n", "<|assistant|>\n").removesuffix("{% endif %}")
        + "{% else %}<|endoftext|>{% endif %}",
        *("{}<|end|>", PHI, "<|endoftext|>", "first"),
    ),
    "phi-4": Family(
        turns(
            "<|im_start|>user<|im_sep|>@<|im_end|>",
            "<|im_start|>assistant<|im_sep|>@<|im_end|>",
            "<|im_start|>assistant<|im_sep|>",
        ),
        *("{}<|im_end|>", [*IM, "<|im_sep|>"], "<|im_end|>"),
    ),
    "gemma": Family(
        turns(
            "<start_of_turn>user\n{{ m['content'] | trim }}<end_of_turn>\n",
            "<start_of_turn>model\n{{ m['content'] | trim }}<end_of_turn>\n",
            *("<start_of_turn>model\n", "<bos>"),
        ),
        *("{}<end_of_turn>", GEMMA, "<end_of_turn>", "never"),
    ),
    "granite": Family(
        turns(
            "<|start_of_role|>{{ m['role'] }}<|end_of_role|>@<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>@<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        *("{}<|end_of_text|>", ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"], "<|end_of_text|>"),
    ),
    "smollm3": Family(
        "<|im_start|>system\nToday Date: {{ strftime_now('%d %B %Y') }}\n<|im_end|>\n" + QWEN3,
        *("<think>\n\n</think>\n\n{}<|im_end|>", IM, "<|im_end|>"),
    ),
    "gpt-oss": Family(HARMONY_TEMPLATE, "<|channel|>final<|message|>{}<|return|>", HARMONY, "<|return|>"),
    "glm-4": Family(
        turns("<|user|>\n@", "<|assistant|>\n@", "<|assistant|>\n", "[gMASK]<sop>"), "{}<|endoftext|>", GLM, GLM[-1]
    ),
    "glm-4.5": Family(
        turns("<|user|>\n@", "<|assistant|>\n<think></think>\n@", "<|assistant|>\n", "[gMASK]<sop>"),
        *("<think></think>\n{}<|endoftext|>", GLM, GLM[-1]),
    ),
    "command r": Family(
        turns(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>@<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>@<|END_OF_TURN_TOKEN|>",
            *("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<BOS_TOKEN>"),
        ),
        *("{}<|END_OF_TURN_TOKEN|>", COMMAND, COMMAND[2]),
    ),
    "falcon": Family(turns("User: @\n\n", "Assistant: @\n\n", "Assistant:"), " {}<|endoftext|>", [], "<|endoftext|>"),
    "olmo 2": Family(
        turns("<|user|>\n@\n", "<|assistant|>\n@<|endoftext|>\n", "<|assistant|>\n", "<|endoftext|>"),
        *("{}<|endoftext|>", [], "<|endoftext|>"),
    ),
    "exaone": Family(
        turns("[|user|]@\n", "[|assistant|]@[|endofturn|]\n", "[|assistant|]"),
        *("{}[|endofturn|]", ["[|user|]", "[|assistant|]"], "[|endofturn|]"),
    ),
    "openchat": Family(
        turns("GPT4 Correct User: @<|end|>", "GPT4 Correct Assistant: @<|end|>", "GPT4 Correct Assistant:", "<s>"),
        *(" {}<|end|>", ["<s>"], "<|end|>", "first"),
    ),
    "kimi k2": Family(
        turns(
            "<|im_user|>user<|im_middle|>@<|im_end|>",
            *("<|im_assistant|>assistant<|im_middle|>@<|im_end|>", "<|im_assistant|>assistant<|im_middle|>"),
        ),
        *("{}<|im_end|>", ["<|im_user|>", "<|im_middle|>", "<|im_assistant|>"], "<|im_end|>"),
    ),
    "seed-oss": Family(
        turns("<seed:bos>user\n@<seed:eos>", "<seed:bos>assistant\n@<seed:eos>", "<seed:bos>assistant\n"),
        *("{}<seed:eos>", ["<seed:bos>"], "<seed:eos>"),
    ),
    "minimax m2": Family(
        turns("]~b]user\n@[e~[\n", ANSWER + "]~b]ai\n{{ c }}[e~[\n", "]~b]ai\n<think>\n"),
        *(THINKS + "[e~[", ["]~b]", "<think>", "</think>"], "[e~["),
    ),
    "nemotron": Family(
        turns("<extra_id_1>User\n@\n", "<extra_id_1>Assistant\n@\n", "<extra_id_1>Assistant\n"),
        *("{}</s>", ["<extra_id_1>"], "</s>", "never"),
    ),
}
