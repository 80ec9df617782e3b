import pytest

from skyrl_gym.adapters.ansi import strip_colors


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("SFFF", "SFFF"),
        ("\x1b[41mS\x1b[0mFFF", "[S]FFF"),
        ("\x1b[34;1mB\x1b[0m|\x1b[35mR\x1b[0m", "<blue B>|<magenta R>"),
        ("\x1b[43m \x1b[0m", "[ ]"),
        ("\x1b[102mx\x1b[m\x1b[94my\x1b[39mz", "[x]<blue y>z"),
        ("\x1b[2J\x1b[1;1Hx\x1b[1mbold\x1b[0m", "xbold"),
        ("", ""),
    ],
)
def test_colors_become_brackets(text: str, plain: str) -> None:
    assert strip_colors(text) == plain
