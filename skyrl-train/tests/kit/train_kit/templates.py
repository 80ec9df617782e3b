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
    "{{ m['content'].split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m['content'] "
    "else m.reasoning_content }}\n"
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

DEEPSEEK_V3 = (  # R1 too; calls are written only if the content is null, with their arguments as text
    "{% set ns = namespace(system='', is_tool=false) %}"
    "{% for m in messages if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endfor %}"
    "<｜begin▁of▁sentence｜>{{ ns.system }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.is_tool = false %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' and m['content'] is none %}{{ '<｜Assistant｜>' }}"
    "{% for call in m['tool_calls'] %}"
    "{{ '<call>' + call['type'] + '<sep>' + call['function']['name'] + '\\n```json\\n' "
    "+ call['function']['arguments'] + '\\n```</call>' }}{% endfor %}{{ '<｜end▁of▁sentence｜>' }}"
    "{% elif m['role'] == 'assistant' %}{{ '' if ns.is_tool else '<｜Assistant｜>' }}{% set ns.is_tool = false %}"
    "{{ m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{% else %}{% set ns.is_tool = true %}{{ '<output>' + m['content'] + '</output>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜>' }}{% endif %}"
)
INST = ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
MISTRAL_V3 = (  # Nemo too; the system message is in the last turn of the user, if nothing follows it
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}<s>{% for m in turns %}"
    "{% if m['role'] == 'user' %}{% if loop.last and system is defined %}"
    "{{ '[INST] ' + system + '\\n\\n' + m['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for call in m.tool_calls %}{{ call.function | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}]</s>"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}"
    "{% else %}{{ '[TOOL_RESULTS] ' + m['content'] + '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)
CHATML_CALLS = (  # Qwen2.5
    "{% for call in m.tool_calls or [] %}{{ '\\n' if m['content'] or not loop.first else '' }}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>"
)
QWEN35_THOUGHT = (  # Qwen3-Next too: the header opens a thought, and turns after the last query keep it
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% else %}"
    "{% set thought = m.reasoning_content or '' %}{% set content = m.content %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}{{ '<think>\\n' + thought.strip() + '\\n</think>\\n\\n' }}{% endif %}{{ content }}"
    + CHATML_CALLS
    + "\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n' }}{% endif %}"
)
GPT_OSS = (  # reads `thinking`, and writes it if the turn is the last one; beside calls, either it or the content
    "<|start|>system<|message|>You are a model.<|end|>{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls and m.thinking and m.content %}{{ raise_exception('both content and thinking') }}{% endif %}"
    "{% set thought = m.thinking or (m.content if m.tool_calls else '') %}"
    "{% if thought and (loop.last or m.tool_calls) %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ thought }}<|end|>"
    "{% endif %}{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}<|start|>assistant to=functions."
    "{{ call.name }}"
    "<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GLM45 = (
    "[gMASK]<sop>{% set ns = namespace(last=0) %}"
    "{% for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{{ '/nothink' if enable_thinking is false and not m.content.endswith('/nothink') else '' }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{% set thought = m.reasoning_content or '' %}"
    "{% set content = m.content %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '\\n<think>' + (thought.strip() if loop.index0 > ns.last else '') + '</think>' }}"
    "{{ '\\n' + content.strip() if content.strip() else '' }}{% for call in m.tool_calls or [] %}{{ '\\n<tool_call>' }}"
    "{{ call.function.name }}\n{% for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% else %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '\\n<think></think>' if enable_thinking is false else '' }}"
    "{% endif %}"
)
LLAMA31 = (  # one call a turn; it is written instead of the content
    "<|begin_of_text|>{% for m in messages %}"
    "{% if not (m.role == 'tool' or m.role == 'ipython' or 'tool_calls' in m) %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% elif 'tool_calls' in m %}"
    "{% if not m.tool_calls | length == 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}<|eot_id|>"
    "{% else %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA3 = (  # the system message begins the first turn of the user; roles have to alternate
    "<bos>{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}"
    "{% set turns = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}"
    "{{ m.content | trim }}{{ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
KIMI_K2 = (  # with a system message of its own
    "{% if messages[0].role != 'system' %}<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>"
    "{{ m.role }}<|im_middle|>"
    "{{ m.content }}{% if m.tool_calls %}<|calls|>{% for call in m.tool_calls %}<|call|>"
    "{{ call.function.name }}<|arguments|>"
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{{ call.function.arguments | tojson }}{% endif %}<|call_end|>{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
HUNYUAN = (  # writes the inner part of an <answer> only, and removes thoughts
    "<|bos|>{% for m in messages %}{% if m.role == 'assistant' %}{% set c = m.content.split('</think>')[-1].strip() %}"
    "{% if '<answer>' in c and '</answer>' in c %}"
    "{% set c = c.split('<answer>')[-1].split('</answer>')[0].strip() %}{% endif %}"
    "<|hy_Assistant|>{{ c }}<|eos|>{% elif m.role == 'user' %}<|hy_User|>"
    "{{ '/no_think' if enable_thinking is false and loop.last else '' }}{{ m.content }}"
    "{% else %}{{ m.content }}<|hy_sep|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|hy_Assistant|>{% if enable_thinking is false %}<think>\n\n</think>\n"
    "{% endif %}{% endif %}"
)
NEMOTRON_NANO = (  # "/no_think" in a message of the user closes the thought of the header
    "{% set ns = namespace(thinks=true) %}{% for m in messages if m.role in ('user', 'system') %}"
    "{% if '/no_think' in m.content %}{% set ns.thinks = false %}{% elif '/think' in m.content %}"
    "{% set ns.thinks = true %}{% endif %}{% endfor %}<SPECIAL_10>System\n"
    "{{ messages[0].content.replace('/no_think', '').replace('/think', '') if messages[0].role == 'system' else '' }}\n"
    "{% for m in messages %}{% if m.role == 'user' %}<SPECIAL_11>User\n{{ m.content.replace('/no_think', '') }}\n"
    "{% elif m.role == 'assistant' %}<SPECIAL_11>Assistant\n"
    "{{ m.content.split('</think>')[-1].strip() }}\n<SPECIAL_12>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<SPECIAL_11>Assistant\n"
    "{{ '<think>\\n' if ns.thinks else '<think></think>' }}{% endif %}"
)
GRANITE33 = (  # `thinking` asks for <think> and <response> by a system message
    "{% set system = messages[0].content if messages[0].role == 'system' else 'You are Granite.' %}"
    "<|start_of_role|>system<|end_of_role|>{{ system }}"
    "{{ ' Write <think></think> first.' if thinking else '' }}<|end_of_text|>\n"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'assistant' and m.tool_calls %}"
    "<|start_of_role|>assistant<|end_of_role|><|tool_call|>[{% for call in m.tool_calls %}{{ call.function | tojson }}"
    "{% endfor %}]{{ m.content }}<|end_of_text|>\n{% else %}"
    "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

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
    "deepseek-v3": Family(
        DEEPSEEK_V3,
        *("{}<｜end▁of▁sentence｜>", R1, R1[1]),
        call='<call>function<sep>add\n```json\n{"a": 1}\n```</call><｜end▁of▁sentence｜>',
    ),
    "deepseek-r1": Family(
        DEEPSEEK_V3.replace("{{ '<｜Assistant｜>' }}{% endif %}", "{{ '<｜Assistant｜><think>\\n' }}{% endif %}"),
        *(THINKS + "<｜end▁of▁sentence｜>", R1, R1[1]),
        call='\n</think>\n\n<call>function<sep>add\n```json\n{"a": 1}\n```</call><｜end▁of▁sentence｜>',
        thought="Hm\n</think>\n\nIt is 4.<｜end▁of▁sentence｜>",
    ),
    "mistral v0.3, with tools": Family(
        MISTRAL_V3,
        *(" {}</s>", INST),
        kind="first",
        call='[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>',
    ),
    "qwen3.5": Family(
        QWEN35_THOUGHT,
        *(THINKS + "<|im_end|>", IM, "<|im_end|>"),
        call='\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        thought="Hm\n</think>\n\nIt is 4.<|im_end|>",
    ),
    "qwen3.5 without thinking": Family(
        QWEN35_THOUGHT,
        *("{}<|im_end|>", IM, "<|im_end|>"),
        variables={"enable_thinking": False},
        call='<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
    ),
    "gpt-oss, with tools": Family(
        GPT_OSS,
        *("<|channel|>final<|message|>{}<|return|>", [*HARMONY, "<|call|>"], "<|return|>"),
        call=' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        thought="<|channel|>analysis<|message|>Hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
    ),
    "glm-4.5, with tools": Family(
        GLM45,
        *("\n<think></think>\n{}<|endoftext|>", GLM, GLM[-1]),
        call="\n<think></think>\n<tool_call>add\n"
        "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|endoftext|>",
        thought="\n<think>Hm</think>\nIt is 4.<|endoftext|>",
    ),
    "glm-4.5 without thinking": Family(
        GLM45, *("\n{}<|endoftext|>", GLM, GLM[-1]), variables={"enable_thinking": False}
    ),
    "llama 3.1": Family(
        LLAMA31, *("{}<|eot_id|>", LLAMA3, "<|eot_id|>"), call='{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
    ),
    "gemma 3": Family(GEMMA3, *("{}<end_of_turn>", GEMMA, "<end_of_turn>", "never")),
    "kimi k2, with tools": Family(
        KIMI_K2,
        *("{}<|im_end|>", ["<|im_user|>", "<|im_middle|>", "<|im_assistant|>", "<|im_system|>"], "<|im_end|>"),
        call='<|calls|><|call|>add<|arguments|>{"a": 1}<|call_end|><|im_end|>',
    ),
    "hunyuan": Family(HUNYUAN, "{}<|eos|>", ["<|bos|>", "<|hy_User|>", "<|hy_Assistant|>"], "<|eos|>"),
    "hunyuan without thinking": Family(
        HUNYUAN,
        *("{}<|eos|>", ["<|bos|>", "<|hy_User|>", "<|hy_Assistant|>"], "<|eos|>"),
        variables={"enable_thinking": False},
    ),
    "nemotron nano 2": Family(
        NEMOTRON_NANO,
        *("\n</think>\n\n{}\n<SPECIAL_12>", ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"], "<SPECIAL_12>"),
        thought="Hm\n</think>\n\nIt is 4.\n<SPECIAL_12>",
    ),
    "granite 3.3": Family(
        GRANITE33,
        *("{}<|end_of_text|>", ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"], "<|end_of_text|>"),
        call='<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|end_of_text|>',
    ),
}
