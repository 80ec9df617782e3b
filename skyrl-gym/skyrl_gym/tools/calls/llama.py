"""Calls of Llama 3.1: JSON after a tag, separated by semicolons or white space.

    <|python_tag|>{"name": "search", "parameters": {"query": "Mount Fuji"}}

Llama 3.2 and 4 write bare JSON or a list in Python's notation. Nothing marks these as calls, so they are text.
"""

from skyrl_gym.tools.calls.call import Format, Parsed, parse_json_in, skip_space, to_call


def _parse(text: str, start: int, end: int) -> Parsed:
    calls = []
    while True:
        value, position = parse_json_in(text, end)
        calls.append(to_call(value, position))
        end = skip_space(text, position)
        if text.startswith(";", end):
            end += 1
        elif not text.startswith("{", end):
            return Parsed(calls, end)


LLAMA = Format(r"<\|python_tag\|>", _parse)
