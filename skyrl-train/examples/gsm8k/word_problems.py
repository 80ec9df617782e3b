"""Grade-school word problems from templates, with worked answers in GSM8K's format.

They are for first runs and tests: a few kinds of problems with varying numbers. Results are not comparable to GSM8K.
"""

import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle

PEOPLE = (
    *(("Amara", "she"), ("Bruno", "he"), ("Chen", "he"), ("Dalia", "she"), ("Emil", "he"), ("Farah", "she")),
    *(("Goran", "he"), ("Hana", "she"), ("Ivo", "he"), ("Jun", "he"), ("Kadri", "she"), ("Lena", "she")),
    *(("Milo", "he"), ("Nadia", "she"), ("Omar", "he"), ("Priya", "she"), ("Rosa", "she"), ("Tomas", "he")),
)
GOODS = ("notebooks", "tickets", "candles", "plants", "mugs", "posters", "kites", "puzzles", "scarves", "lamps")
SWEETS = ("cookies", "muffins", "pancakes", "waffles", "rolls", "tarts")
CROPS = ("tomato", "pepper", "bean", "cucumber", "pumpkin", "melon")


def divide(a: int, b: int) -> int:
    """Return a / b, which must be an integer."""
    quotient, rest = divmod(a, b)
    assert rest == 0, f"{a} / {b} is not whole"
    return quotient


OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": divide,
}


@dataclass(slots=True)
class Working:
    """A worked answer, line by line, with GSM8K's annotations: ``2*3=<<2*3=6>>6``."""

    lines: list[str] = field(default_factory=list)
    last: int = 0

    def step(self, text: str, a: int, sign: str, b: int) -> int:
        """Calculate a result and insert it into `text` at ``{}``."""
        self.last = OPERATIONS[sign](a, b)
        self.lines.append(text.format(f"{a}{sign}{b}=<<{a}{sign}{b}={self.last}>>{self.last}"))
        return self.last

    def answer(self) -> str:
        """Return the lines, followed by the last result as ``#### 6``."""
        return "\n".join([*self.lines, f"#### {self.last}"])


def change(rng: random.Random, work: Working) -> str:
    """Ask for the change after a purchase of two kinds of things."""
    (name, who), (first, second) = rng.choice(PEOPLE), rng.sample(GOODS, 2)
    n, price, m, other_price = (rng.randint(2, 9) for _ in range(4))
    paid = (n * price + m * other_price) // 50 * 50 + 50
    cost = work.step(f"The {first} cost {{}} dollars.", n, "*", price)
    other_cost = work.step(f"The {second} cost {{}} dollars.", m, "*", other_price)
    total = work.step("Together that is {} dollars.", cost, "+", other_cost)
    work.step(f"{name} gets back {{}} dollars.", paid, "-", total)
    return (
        f"{name} buys {n} {first} for ${price} each and {m} {second} for ${other_price} each. {who.capitalize()} pays "
        f"with ${paid}. How many dollars does {who} get back?"
    )


def half_as_many(rng: random.Random, work: Working) -> str:
    """Ask for the sum of a number and a fraction of it."""
    (name, who), thing = rng.choice(PEOPLE), rng.choice(GOODS)
    part, word = rng.choice([(2, "half"), (3, "a third"), (4, "a quarter")])
    n = part * rng.randint(3, 30)
    fewer = work.step(f"In May {name} sold {{}} {thing}.", n, "/", part)
    work.step(f"In both months {name} sold {{}} {thing}.", n, "+", fewer)
    return (
        f"{name} sold {n} {thing} in April, and {word} as many in May. How many {thing} did {who} sell in April and "
        "May together?"
    )


def shares(rng: random.Random, work: Working) -> str:
    """Ask for each friend's share of several boxes after some pieces are kept."""
    (name, who), sweet = rng.choice(PEOPLE), rng.choice(SWEETS)
    n_friends, each, per_box = rng.randint(3, 9), rng.randint(3, 12), rng.choice([4, 5, 6, 8, 10, 12])
    n_boxes = n_friends * each // per_box + 2
    kept = n_boxes * per_box - n_friends * each
    total = work.step(f"There are {{}} {sweet}.", n_boxes, "*", per_box)
    shared = work.step(f"{name} shares out {{}} of them.", total, "-", kept)
    work.step("Each friend gets {}.", shared, "/", n_friends)
    return (
        f"{name} has {n_boxes} boxes with {per_box} {sweet} each. {who.capitalize()} keeps {kept} of them and "
        f"shares the others equally among {n_friends} friends. How many {sweet} does each friend get?"
    )


def journey(rng: random.Random, work: Working) -> str:
    """Ask for the distance driven at two speeds."""
    name, who = rng.choice(PEOPLE)
    hours, other_hours = rng.randint(2, 6), rng.randint(2, 6)
    speed, other_speed = rng.sample(range(30, 101, 5), 2)
    first = work.step("The first part is {} kilometres long.", hours, "*", speed)
    second = work.step("The second part is {} kilometres long.", other_hours, "*", other_speed)
    work.step(f"In all {name} drives {{}} kilometres.", first, "+", second)
    return (
        f"{name} drives for {hours} hours at {speed} kilometres per hour, and then for {other_hours} hours at "
        f"{other_speed} kilometres per hour. How many kilometres does {who} drive in all?"
    )


def wages(rng: random.Random, work: Working) -> str:
    """Ask for the remainder of several weeks' wages after a purchase."""
    name, who = rng.choice(PEOPLE)
    hours, rate, weeks = rng.randint(8, 30), rng.randint(9, 25), rng.randint(2, 6)
    spent = 10 * rng.randint(3, 10)
    weekly = work.step(f"{name} earns {{}} dollars a week.", hours, "*", rate)
    total = work.step(f"In {weeks} weeks that is {{}} dollars.", weekly, "*", weeks)
    work.step("What is left is {} dollars.", total, "-", spent)
    return (
        f"{name} works {hours} hours a week for ${rate} an hour. After {weeks} weeks {who} spends ${spent} of the "
        f"earnings on a coat. How many dollars of the earnings does {who} have left?"
    )


def discount(rng: random.Random, work: Working) -> str:
    """Ask for the cost of several things at a reduced price."""
    (name, who), thing = rng.choice(PEOPLE), rng.choice(GOODS)
    price, percent, n = 20 * rng.randint(1, 10), 5 * rng.randint(1, 12), rng.randint(2, 8)
    hundredths = work.step("In hundredths of a dollar, the price falls by {}.", price, "*", percent)
    less = work.step("In dollars that is {}.", hundredths, "/", 100)
    reduced = work.step("Each one now costs {} dollars.", price, "-", less)
    work.step(f"{name} pays {{}} dollars.", n, "*", reduced)
    return (
        f"A shop sells {thing} for ${price} each. In a sale the price falls by {percent}%. {name} buys {n} {thing} in "
        f"the sale. How many dollars does {who} pay?"
    )


def ages(rng: random.Random, work: Working) -> str:
    """Ask for the combined age of two people in some years."""
    (name, _), (other, _) = rng.sample(PEOPLE, 2)
    age, times, years = rng.randint(4, 15), rng.randint(2, 5), rng.randint(2, 20)
    older = work.step(f"{name} is {{}} years old.", times, "*", age)
    together = work.step("Today they are {} years old together.", older, "+", age)
    added = work.step(f"In {years} years they will be {{}} years older together.", years, "*", 2)
    work.step("Then they will be {} years old together.", together, "+", added)
    return (
        f"{name} is {times} times as old as {other}, who is {age} years old. How old will they be together, if their "
        f"ages are added up, in {years} years?"
    )


def pages(rng: random.Random, work: Working) -> str:
    """Ask for the daily share of a book's remaining pages."""
    name, who = rng.choice(PEOPLE)
    daily, days, days_left, rest = rng.randint(8, 40), rng.randint(3, 9), rng.randint(2, 9), rng.randint(5, 45)
    total = daily * days + days_left * rest
    read = work.step(f"{name} has read {{}} pages.", daily, "*", days)
    left = work.step("There are {} pages left.", total, "-", read)
    work.step("A day that is {} pages.", left, "/", days_left)
    return (
        f"{name} reads a book of {total} pages. {who.capitalize()} has read {daily} pages a day for {days} days, and "
        f"wants to finish it in {days_left} more days, with the same number of pages each day. How many pages a day "
        "is that?"
    )


def bakery(rng: random.Random, work: Working) -> str:
    """Ask for the earnings from the pieces that are not eaten."""
    (name, who), sweet = rng.choice(PEOPLE), rng.choice(SWEETS)
    trays, per_tray, price = rng.randint(2, 9), rng.choice([6, 8, 9, 12, 15]), rng.randint(2, 5)
    eaten = rng.randint(2, 10)
    baked = work.step(f"{name} bakes {{}} {sweet}.", trays, "*", per_tray)
    sold = work.step(f"{name} sells {{}} of them.", baked, "-", eaten)
    work.step(f"{name} earns {{}} dollars.", sold, "*", price)
    return (
        f"{name} bakes {trays} trays of {per_tray} {sweet} each. The family eats {eaten} of them, and {who} sells the "
        f"others for ${price} each. How many dollars does {who} earn?"
    )


def harvest(rng: random.Random, work: Working) -> str:
    """Ask for the harvest of a garden, less the plants that die."""
    (name, who), crop = rng.choice(PEOPLE), rng.choice(CROPS)
    rows, per_row, each, lost = rng.randint(3, 9), rng.randint(4, 12), rng.randint(3, 9), rng.randint(2, 11)
    plants = work.step(f"{name} sets {{}} plants.", rows, "*", per_row)
    alive = work.step("Of these, {} live.", plants, "-", lost)
    work.step("They give {} fruits.", alive, "*", each)
    return (
        f"{name} sets {rows} rows of {per_row} {crop} plants each, of which {lost} die. Each of the others gives "
        f"{each} fruits. How many fruits does {who} harvest?"
    )


def savings(rng: random.Random, work: Working) -> str:
    """Ask for the time needed to save a missing amount."""
    (name, who), weeks = rng.choice(PEOPLE), rng.randint(3, 16)
    weekly, owned = rng.randint(5, 30), rng.randint(10, 90)
    price = owned + weekly * weeks
    missing = work.step("What is missing is {} dollars.", price, "-", owned)
    work.step("That takes {} weeks.", missing, "/", weekly)
    return (
        f"{name} wants to buy a bicycle for ${price}. {who.capitalize()} has ${owned} and saves ${weekly} a week. "
        f"After how many weeks can {who} buy it?"
    )


def fence(rng: random.Random, work: Working) -> str:
    """Ask for the cost of a fence around a rectangle."""
    (name, who), price = rng.choice(PEOPLE), rng.randint(3, 15)
    length, width = rng.sample(range(5, 41), 2)
    half = work.step("One long and one short side are {} metres.", length, "+", width)
    around = work.step("All the way around, it is {} metres.", half, "*", 2)
    work.step("The fence costs {} dollars.", around, "*", price)
    return (
        f"{name} puts a fence around a rectangular meadow that is {length} metres long and {width} metres wide. A "
        f"metre of the fence costs ${price}. How many dollars does {who} pay for it?"
    )


def bus(rng: random.Random, work: Working) -> str:
    """Ask for the number of people on a bus after two stops."""
    start, on, more_on = rng.randint(12, 40), rng.randint(3, 15), rng.randint(3, 15)
    off, more_off = rng.randint(2, 7), rng.randint(2, 7)
    first = work.step("After getting off at the first stop there are {} people.", start, "-", off)
    second = work.step("After getting on there, {} people.", first, "+", on)
    third = work.step("After getting off at the second stop, {} people.", second, "-", more_off)
    work.step("After getting on there, {} people.", third, "+", more_on)
    return (
        f"A bus starts with {start} people. At the first stop {off} get off and {on} get on. At the second stop "
        f"{more_off} get off and {more_on} get on. How many people are on the bus then?"
    )


def average(rng: random.Random, work: Working) -> str:
    """Ask for the score needed to reach an average."""
    name, who = rng.choice(PEOPLE)
    wanted = rng.randint(70, 90)
    first, second, third = (wanted + rng.randint(-9, 9) for _ in range(3))
    needed = work.step("All four tests need {} points together.", 4, "*", wanted)
    two = work.step("The first two gave {} points.", first, "+", second)
    three = work.step("The first three gave {} points.", two, "+", third)
    work.step("The fourth must give {} points.", needed, "-", three)
    return (
        f"{name} had {first}, {second} and {third} points in three tests. How many points does {who} need in the "
        f"fourth test for an average of {wanted} points in all four?"
    )


Kind = Callable[[random.Random, Working], str]
KINDS: tuple[Kind, ...] = (
    *(change, half_as_many, shares, journey, wages, discount, ages),
    *(pages, bakery, harvest, savings, fence, bus, average),
)


def word_problems(n_problems: int, seed: int) -> dict[str, str]:
    """Generate different questions with their worked answers, the same number of each kind."""
    rng = random.Random(seed)
    answers: dict[str, str] = {}
    kinds = cycle(KINDS)
    while len(answers) < n_problems:
        kind, n_before = next(kinds), len(answers)
        while len(answers) == n_before:
            work = Working()
            answers.setdefault(kind(rng, work), work.answer())
    return answers
