"""The verifiable instructions of IFEval (Zhou et al., 2023, arXiv:2311.07911).

Each check is a function of a reply and of the instruction's kwargs. The annotations of its parameters are the types
that a row's kwargs must have. The checks follow the paper where its prompts are precise. Where a reply could satisfy
the letter of an instruction only, they are stricter than the paper's code:

- A keyword must be a whole word: "art" is not in "party". Invisible characters are removed first.
- Placeholders, highlights, bullets and titles in a program (a fenced block with the name of a language) do not count,
  nor do links, indices such as ``a[i]``, checkboxes and footnotes.
- Paragraphs, sections, responses, quotations and postscripts need at least one word.
- A postscript follows other text, and an answer follows a repeated prompt.
- A constrained response contains one of the options, not several.
- JSON is an object or a list.
- ``don't`` is one word, and so is each Chinese or Japanese character.
- A comma of any script is a comma.
- A text of unclear language is in none. In the instructions about case, a text of a few words counts as English.
"""

import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from skyrl_gym.envs.entry_point import suggest_name
from skyrl_gym.envs.ifeval.language import check_language, is_in_language
from skyrl_gym.envs.ifeval.reply import Reply, fold, has_word, show
from skyrl_gym.envs.options import set_options


def _parse_text(text: str) -> str:
    if not (shown := show(text)):
        raise ValueError("must not be blank")
    return shown


def _parse_letter(text: str) -> str:
    if len(text) > 1:
        raise ValueError("must be a single character")
    return text


Text = Annotated[str, AfterValidator(_parse_text)]
Words = Annotated[list[Text], Field(min_length=1)]
Letter = Annotated[Text, AfterValidator(_parse_letter)]
Language = Annotated[Text, AfterValidator(check_language)]
Count = Annotated[
    int,  # pandas turns integers beside missing values into floats
    BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value),
    Field(ge=1),
]
Relation = Literal["at least", "less than"]

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
MIN_LETTERS = 40
"""Texts with fewer letters are too short to tell that they are not English."""

_BULLET = re.compile(r"[ \t]*[*+-][ \t]")
_BRACKETS = re.compile(r"(?<![A-Za-z0-9_)\]\\])\[([^\[\]\n]+)\](?!\()")
_CHECKBOX = ("x", "X")
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?=[^\s*])([^*\n]*[^\s*])\1(?!\*)")
_TITLE = re.compile(r"<<([^<>\n]+)>>")
_JSON_FENCE = re.compile(r"```(?:json)?(?=\s)(.*)```", re.DOTALL | re.IGNORECASE)
_CLOSING = "\"'”’*_ "


@dataclass(frozen=True)
class Instruction:
    """An instruction of a row: its id and its kwargs, which fit the parameters of its check."""

    id: str
    kwargs: Mapping[str, Any]

    @property
    def needs_language(self) -> bool:
        """True if the check identifies a language."""
        return self.id in ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")

    def is_followed(self, reply: Reply) -> bool:
        """Return True if a reply follows the instruction. An empty reply follows none."""
        return bool(reply.text) and CHECKS[self.id](reply, **self.kwargs)


def parse_instructions(truth: Any) -> list[Instruction]:
    """Return the instructions in a ground truth: ``{"instruction_id_list": […], "kwargs": [{…}, …]}``, or its JSON.

    Missing values (null, NaN) among the kwargs are dropped: Parquet gives every instruction the kwargs of all.

    Raises:
        ValueError: an id is unknown, or kwargs are missing, unknown, or of the wrong type.
    """
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise ValueError(f"ground_truth={truth!r:.200} is text but not JSON: {error}") from None
    lists = set_options(truth) if isinstance(truth, Mapping) else {}
    ids, kwargs = lists.get("instruction_id_list"), lists.get("kwargs")
    if not isinstance(ids, list) or not isinstance(kwargs, list) or not ids or len(ids) != len(kwargs):
        raise ValueError(
            f"ground_truth={truth!r:.200} must be {{'instruction_id_list': [ids], 'kwargs': [a dict for each id]}}"
        )
    return [_parse(f"kwargs[{index}]", *pair) for index, pair in enumerate(zip(ids, kwargs, strict=True))]


def _parse(name: str, id: Any, kwargs: Any) -> Instruction:
    if not isinstance(id, str) or id not in CHECKS:
        raise ValueError(
            f"instruction_id_list has the unknown id {id!r}.{suggest_name(str(id), list(CHECKS))} "
            f"The ids are: {', '.join(CHECKS)}"
        )
    if not isinstance(kwargs, Mapping | None):
        raise ValueError(f"{name}={kwargs!r:.200} of {id} must be a dict")
    given = {key: value for key, value in set_options(kwargs).items() if value == value}  # NaN is not equal to itself
    try:
        parsed = dict(_MODELS[id](**given))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, (name, *problem["loc"])))
        known = ", ".join(_MODELS[id].model_fields) or "none"
        if problem["type"] == "missing":
            raise ValueError(f"{key} is missing; the kwargs of {id} are: {known}") from None
        if problem["type"] == "extra_forbidden":
            raise ValueError(f"{key}={problem['input']!r:.200} is unknown; the kwargs of {id} are: {known}") from None
        reason = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise ValueError(f"{key}={problem['input']!r:.200} of {id}: {reason}") from None
    if parsed.get("nth_paragraph", 0) > parsed.get("num_paragraphs", 0):
        raise ValueError(
            f"{name}.nth_paragraph={parsed['nth_paragraph']} of {id} must be at most num_paragraphs="
            f"{parsed['num_paragraphs']}"
        )
    return Instruction(id, parsed)


def check_strict(instructions: Sequence[Instruction], reply: str) -> list[bool]:
    """Return for each instruction whether a reply follows it."""
    shown = Reply(reply)
    return [instruction.is_followed(shown) for instruction in instructions]


def check_loose(instructions: Sequence[Instruction], reply: str, strict: Sequence[bool]) -> list[bool]:
    """Return for each instruction whether one of the paper's eight variants of a reply follows it.

    Args:
        strict: the result of `check_strict`.
    """
    variants = [Reply(variant) for variant in dict.fromkeys(_variants(reply))]
    return [
        is_followed or any(map(instruction.is_followed, variants))
        for instruction, is_followed in zip(instructions, strict, strict=True)
    ]


def _variants(reply: str) -> Iterator[str]:
    """Yield the reply, without its first line, its last line, or both. Then yield these without asterisks."""
    lines = reply.strip().split("\n")
    for kept in (lines, lines[1:], lines[:-1], lines[1:-1]):
        yield "\n".join(kept)
        yield "\n".join(kept).replace("*", "")


def _is_related(count: int, relation: Relation, bound: int) -> bool:
    return count >= bound if relation == "at least" else count < bound


def has_keywords(reply: Reply, keywords: Words) -> bool:
    """Return True if the reply contains all keywords."""
    return all(any(reply.find(keyword)) for keyword in keywords)


def has_keyword_frequency(reply: Reply, keyword: Text, frequency: Count, relation: Relation) -> bool:
    """Compare the number of occurrences of a keyword with `frequency`."""
    return _is_related(sum(1 for _ in reply.find(keyword)), relation, frequency)


def lacks_words(reply: Reply, forbidden_words: Words) -> bool:
    """Return True if the reply contains none of the words."""
    return not any(any(reply.find(word)) for word in forbidden_words)


def has_letter_frequency(reply: Reply, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    """Compare the number of occurrences of a letter, in either case, with `let_frequency`. It may be any character."""
    return _is_related(reply.text.lower().count(letter.lower()), let_relation, let_frequency)


def is_in_response_language(reply: Reply, language: Language) -> bool:
    """Return True if the reply, without its programs, is in the language."""
    return is_in_language(reply.prose, language)


def has_sentences(reply: Reply, num_sentences: Count, relation: Relation) -> bool:
    """Compare the number of sentences with `num_sentences`."""
    return _is_related(reply.count_sentences(), relation, num_sentences)


def has_paragraphs(reply: Reply, num_paragraphs: Count) -> bool:
    """Return True if the reply has exactly `num_paragraphs` paragraphs, with ``***`` between them."""
    return _are_texts(reply.divide("3"), num_paragraphs)


def has_words(reply: Reply, num_words: Count, relation: Relation) -> bool:
    """Compare the number of words with `num_words`."""
    return _is_related(len(reply.words), relation, num_words)


def has_nth_first_word(reply: Reply, num_paragraphs: Count, nth_paragraph: Count, first_word: Text) -> bool:
    """Return True if there are exactly `num_paragraphs` blocks between blank lines, and one starts with the word."""
    paragraphs = reply.paragraphs()
    if not _are_texts(paragraphs, num_paragraphs):
        return False
    paragraph = Reply(paragraphs[nth_paragraph - 1])
    first = next(paragraph.find(first_word), None)
    return first is not None and not has_word(paragraph.folded[: first.start()])


def has_placeholders(reply: Reply, num_placeholders: Count) -> bool:
    """Return True if there are at least `num_placeholders` placeholders such as ``[address]``."""
    inner = (text.strip() for text in _BRACKETS.findall(reply.prose))
    n_placeholders = sum(text not in _CHECKBOX and any(map(str.isalpha, text)) for text in inner)
    return n_placeholders >= num_placeholders


def has_postscript(reply: Reply, postscript_marker: Text) -> bool:
    """Return True if the marker stands between words. ``P. S.`` is ``P.S.``"""
    marker = re.escape(fold(postscript_marker)).replace(r"\.", r"\. ?")
    match = re.search(rf"(?<![\w.]){marker}(?!\w)", reply.folded)
    return match is not None and has_word(reply.folded[: match.start()]) and has_word(reply.folded[match.end() :])


def has_bullets(reply: Reply, num_bullets: Count) -> bool:
    """Return True if there are exactly `num_bullets` bullets of Markdown."""
    bullets = filter(None, map(_BULLET.match, reply.prose.split("\n")))
    return sum(has_word(bullet.string[bullet.end() :]) for bullet in bullets) == num_bullets


def is_constrained(reply: Reply) -> bool:
    """Return True if the reply contains exactly one of the options."""
    return sum(option in reply.text for option in OPTIONS) == 1


def has_highlights(reply: Reply, num_highlights: Count) -> bool:
    """Return True if at least `num_highlights` texts are between asterisks: ``*a*`` or ``**a**``."""
    return sum(has_word(match[2]) for match in _HIGHLIGHT.finditer(reply.prose)) >= num_highlights


def has_sections(reply: Reply, section_spliter: Text, num_sections: Count) -> bool:
    """Return True if at least `num_sections` sections have a number and a text. A heading is at the start of a line."""
    heading = re.compile(rf"[\W_]*{re.escape(fold(section_spliter))} ?([0-9]+)(?!\w)")
    texts: dict[str, bool] = {}
    number = None
    for line in map(fold, reply.text.split("\n")):
        if match := heading.match(line):
            number, line = match[1], match.string[match.end() :]
        if number is not None:
            texts[number] = texts.get(number, False) or has_word(line)
    return sum(texts.values()) >= num_sections


def is_json(reply: Reply) -> bool:
    """Return True if the reply is a JSON object or list, which may be in a fenced block."""
    text = reply.raw.strip()
    fenced = _JSON_FENCE.fullmatch(text)
    try:
        value = json.loads(fenced[1] if fenced else text, parse_constant=_refuse_constant, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list)


def has_title(reply: Reply) -> bool:
    """Return True if there is a title in double angular brackets: ``<<title>>``."""
    return any(map(has_word, _TITLE.findall(reply.prose)))


def has_two_responses(reply: Reply) -> bool:
    """Return True if the reply has two responses in different words, with ``******`` (or more) between them."""
    parts = reply.divide("6,")
    return _are_texts(parts, 2) and Reply(fold(parts[0])).words != Reply(fold(parts[1])).words


def repeats_prompt(reply: Reply, prompt_to_repeat: Text) -> bool:
    """Return True if the reply starts with the prompt, word for word, and an answer follows."""
    prompt = fold(prompt_to_repeat)
    return reply.folded.startswith(prompt) and has_word(reply.folded[len(prompt) :])


def ends_with(reply: Reply, end_phrase: Text) -> bool:
    """Return True if the phrase is the end of the reply. Only quotation marks and emphasis may follow."""
    phrase = fold(end_phrase).rstrip(_CLOSING) or fold(end_phrase)
    end = Reply(reply.folded.rstrip(_CLOSING)[-len(phrase) - 1 :])
    return any(match.end() == len(end.folded) for match in end.find(phrase))


def is_quoted(reply: Reply) -> bool:
    """Return True if the whole reply is between double quotation marks."""
    text = reply.text
    return text[0] in '"“' and text[-1] in '"”' and has_word(text[1:-1])


def has_capital_words(reply: Reply, capital_frequency: Count, capital_relation: Relation) -> bool:
    """Compare the number of words in capital letters, "I" included, with `capital_frequency`."""
    return _is_related(sum(map(str.isupper, reply.words)), capital_relation, capital_frequency)


def is_english_capital(reply: Reply) -> bool:
    """Return True if the reply is in English, without lowercase letters."""
    return reply.text.isupper() and _is_english(reply)


def is_english_lowercase(reply: Reply) -> bool:
    """Return True if the reply is in English, without capital letters."""
    return reply.text.islower() and _is_english(reply)


def lacks_commas(reply: Reply) -> bool:
    """Return True if the reply has no comma of any script."""
    return not any(map(_is_comma, set(reply.text)))


def _is_comma(char: str) -> bool:
    """Return True for a comma of any script, and for the low quotation mark that looks like one."""
    return char in ",‚" or (unicodedata.category(char) == "Po" and "COMMA" in unicodedata.name(char, ""))


def _is_english(reply: Reply) -> bool:
    return sum(map(str.isalpha, reply.text)) < MIN_LETTERS or is_in_language(reply.text, "en")


def _are_texts(parts: Sequence[str], n_parts: int) -> bool:
    return len(parts) == n_parts and all(map(has_word, parts))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


CHECKS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_frequency,
    "keywords:forbidden_words": lacks_words,
    "keywords:letter_frequency": has_letter_frequency,
    "language:response_language": is_in_response_language,
    "length_constraints:number_sentences": has_sentences,
    "length_constraints:number_paragraphs": has_paragraphs,
    "length_constraints:number_words": has_words,
    "length_constraints:nth_paragraph_first_word": has_nth_first_word,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:constrained_response": is_constrained,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": has_two_responses,
    "combination:repeat_prompt": repeats_prompt,
    "startend:end_checker": ends_with,
    "startend:quotation": is_quoted,
    "change_case:capital_word_frequency": has_capital_words,
    "change_case:english_capital": is_english_capital,
    "change_case:english_lowercase": is_english_lowercase,
    "punctuation:no_comma": lacks_commas,
}
"""The checks by instruction id."""


def _model(check: Callable[..., bool]) -> type[BaseModel]:
    """Return a model of the kwargs of a check."""
    _, *parameters = inspect.signature(check).parameters.values()
    fields: dict[str, Any] = {parameter.name: (parameter.annotation, ...) for parameter in parameters}
    return create_model(check.__name__, __config__=ConfigDict(strict=True, extra="forbid"), **fields)


_MODELS = {id: _model(check) for id, check in CHECKS.items()}
