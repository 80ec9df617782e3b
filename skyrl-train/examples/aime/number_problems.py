"""Competition problems from templates. Their answers are computed by enumeration.

They are for first runs and tests, and far easier than AIME.
"""

import math
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import cycle, pairwise, product


def n_multiples(limit: int, a: int, b: int) -> int:
    """Count the multiples of exactly one of `a` and `b` in 1 … `limit`."""
    return sum((n % a == 0) != (n % b == 0) for n in range(1, limit + 1))


def divisor_sum(n: int) -> int:
    """Return the sum of the positive divisors of `n`."""
    return sum(d for d in range(1, n + 1) if n % d == 0)


def n_zeros(n: int) -> int:
    """Count the trailing zeros of n!."""
    digits = str(math.factorial(n))
    return len(digits) - len(digits.rstrip("0"))


def n_paths(width: int, height: int, hole: tuple[int, int]) -> int:
    """Count the paths from (0, 0) to (`width`, `height`) in unit steps right and up that avoid the point `hole`."""
    ways = {(0, 0): 1}
    for x, y in product(range(width + 1), range(height + 1)):
        if (x, y) != (0, 0):
            ways[x, y] = 0 if (x, y) == hole else ways.get((x - 1, y), 0) + ways.get((x, y - 1), 0)
    return ways[width, height]


def n_sparse_subsets(n: int) -> int:
    """Count the subsets of 1 … `n` without consecutive numbers, including the empty set."""
    chosen = (format(bits, f"0{n}b") for bits in range(2**n))
    return sum(("1", "1") not in set(pairwise(bits)) for bits in chosen)


def min_with_remainders(moduli: tuple[int, ...], remainders: tuple[int, ...]) -> int:
    """Return the smallest positive number with these remainders. The moduli must be coprime."""
    n = 1
    while any(n % modulus != remainder for modulus, remainder in zip(moduli, remainders, strict=True)):
        n += 1
    return n


def largest_unpayable(a: int, b: int) -> int:
    """Return the largest amount that coins of `a` and `b` cannot pay. The two must be coprime."""
    payable = {x * a + y * b for x in range(b + 1) for y in range(a + 1)}
    return max(set(range(a * b)) - payable)


def n_with_digit_sum(limit: int, digit_sum: int) -> int:
    """Count the numbers in 1 … `limit` whose digits sum to `digit_sum`."""
    return sum(sum(map(int, str(n))) == digit_sum for n in range(1, limit + 1))


def dice_chance(n_dice: int, total: int) -> Fraction:
    """Return the probability that fair dice sum to `total`."""
    n_hits = sum(sum(faces) == total for faces in product(range(1, 7), repeat=n_dice))
    return Fraction(n_hits, 6**n_dice)


def power(rng: random.Random) -> tuple[str, int]:
    """The remainder of a power."""
    base, exponent, modulus = rng.randint(2, 30), rng.randint(20, 2000), rng.randint(7, 999)
    return f"What is the remainder when ${base}^{{{exponent}}}$ is divided by ${modulus}$?", pow(
        base, exponent, modulus
    )


def multiples(rng: random.Random) -> tuple[str, int]:
    """Multiples of exactly one of two numbers."""
    limit, (a, b) = rng.randint(100, 2000), rng.sample(range(2, 20), 2)
    question = (
        f"How many integers from $1$ to ${limit}$, both included, are divisible by exactly one of the numbers "
        f"${a}$ and ${b}$?"
    )
    return question, n_multiples(limit, a, b)


def divisors(rng: random.Random) -> tuple[str, int]:
    """The sum of divisors."""
    n = rng.randint(60, 1500)
    return f"What is the sum of all positive divisors of ${n}$, $1$ and ${n}$ included?", divisor_sum(n)


def zeros(rng: random.Random) -> tuple[str, int]:
    """Trailing zeros of a factorial."""
    n = rng.randint(20, 1000)
    return f"How many zeros are at the end of the decimal expansion of ${n}!$?", n_zeros(n)


def paths(rng: random.Random) -> tuple[str, int]:
    """Paths in a grid with a hole."""
    width, height = rng.randint(3, 7), rng.randint(3, 7)
    hole = rng.randint(1, width - 1), rng.randint(1, height - 1)
    question = (
        f"A path leads from $(0,0)$ to $({width},{height})$ in steps of length $1$ to the right or up. How many such "
        f"paths do not go through the point $({hole[0]},{hole[1]})$?"
    )
    return question, n_paths(width, height, hole)


def subsets(rng: random.Random) -> tuple[str, int]:
    """Subsets without consecutive numbers."""
    n = rng.randint(5, 14)
    numbers = f"$\\{{1, 2, \\ldots, {n}\\}}$"
    question = f"How many subsets of {numbers}, the empty set included, contain no two consecutive integers?"
    return question, n_sparse_subsets(n)


def remainders(rng: random.Random) -> tuple[str, int]:
    """A number with given remainders."""
    moduli = rng.choice([(3, 5, 7), (4, 5, 7), (5, 7, 9), (4, 7, 9), (5, 7, 8), (3, 8, 11), (5, 8, 9)])
    left = tuple(rng.randint(1, modulus - 1) for modulus in moduli)
    parts = [f"${remainder}$ when divided by ${modulus}$" for modulus, remainder in zip(moduli, left, strict=True)]
    question = f"What is the smallest positive integer that leaves remainder {parts[0]}, {parts[1]}, and {parts[2]}?"
    return question, min_with_remainders(moduli, left)


def coins(rng: random.Random) -> tuple[str, int]:
    """The largest amount that two coins cannot pay."""
    a, b = rng.sample(range(3, 40), 2)
    while math.gcd(a, b) > 1:
        a, b = rng.sample(range(3, 40), 2)
    question = (
        f"A country has only coins of ${a}$ and ${b}$ cents, and as many of them as anyone needs. What is the largest "
        "amount, in cents, that cannot be paid exactly without change?"
    )
    return question, largest_unpayable(a, b)


def digits(rng: random.Random) -> tuple[str, int]:
    """Numbers with a given sum of digits."""
    limit, total = rng.choice([500, 999, 1000, 2000, 5000, 9999]), rng.randint(3, 18)
    question = (
        f"How many integers from $1$ to ${limit}$, both included, have decimal digits whose sum is exactly ${total}$?"
    )
    return question, n_with_digit_sum(limit, total)


def dice(rng: random.Random) -> tuple[str, int]:
    """A probability as a fraction, asked in the style of AIME."""
    n_dice = rng.randint(2, 4)
    total = rng.randint(n_dice + 1, 6 * n_dice - 1)
    chance = dice_chance(n_dice, total)
    question = (
        f"{n_dice} fair six-sided dice are rolled. The probability that the numbers shown add up to ${total}$ is "
        "$\\frac{m}{n}$, where $m$ and $n$ are positive integers without a common factor. What is $m + n$?"
    )
    return question, chance.numerator + chance.denominator


Kind = Callable[[random.Random], tuple[str, int]]
KINDS: tuple[Kind, ...] = (power, multiples, divisors, zeros, paths, subsets, remainders, coins, digits, dice)


def number_problems(n_problems: int, seed: int) -> dict[str, int]:
    """Generate different problems with their answers, the same number of each kind."""
    rng = random.Random(seed)
    answers: dict[str, int] = {}
    for kind in cycle(KINDS):
        if len(answers) >= n_problems:
            break
        question, answer = kind(rng)
        answers.setdefault(question, answer)
    return answers
