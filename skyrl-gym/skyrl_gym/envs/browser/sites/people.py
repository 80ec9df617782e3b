"""Names and addresses for tasks."""

from random import Random

FIRST_NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hanna", "Ivo", "Jana", "Kofi", "Lena")
LAST_NAMES = ("Adler", "Brandt", "Costa", "Dumas", "Eriksen", "Fontana", "Grant", "Hoxha", "Ito", "Jansen", "Keller")
STREETS = ("Mill Road", "Park Lane", "Station Street", "Church Hill", "River Walk", "Oak Avenue", "Harbour View")


def draw_name(random: Random) -> tuple[str, str]:
    """Return a first and a last name."""
    return random.choice(FIRST_NAMES), random.choice(LAST_NAMES)


def draw_address(random: Random) -> str:
    """Return a street with a number."""
    return f"{random.randint(1, 99)} {random.choice(STREETS)}"
