"""Make the training data of `router-replay make-model`: correct episodes of the arithmetic and calculator environments.

    12+34=46$                                            # the model must write 46$
    12+34+56?<12+34>[46]<46+56>[102]102$                 # the model must write <12+34>, <46+56>, 102$

Step n of a recipe always has the same examples, so an interrupted run can continue from n alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from router_replay.recipes.tiny.model import CHARACTERS, END, Recipe
from router_replay.rl.environments import arithmetic, calculator
from router_replay.rl.environments.problems import operands

_IDS = {END: 1} | {character: number for number, character in enumerate(CHARACTERS, start=2)}
_PER_STEP = 1 << 32  # problem numbers per step; lower numbers are those of a training run


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Hold token ids [examples, tokens], padded with 0. `own` marks the tokens that the model must write."""

    token_ids: npt.NDArray[np.int64]
    own: npt.NDArray[np.bool_]


def examples_of(recipe: Recipe, step: int) -> tuple[Examples, Examples]:
    """Return the additions and the calculator episodes of one step."""
    first = (step + 1) * _PER_STEP
    additions = [_addition(recipe, first + number) for number in range(recipe.additions)]
    calculations = [_calculation(recipe, first + number) for number in range(recipe.calculations)]
    return _pad(additions), _pad(calculations)


def _addition(recipe: Recipe, problem: int) -> list[tuple[str, bool]]:
    first, second = operands(recipe.seed, problem, count=2, digits=recipe.digits)
    return [(arithmetic.question(first, second), False), (str(first + second), True), (END, True)]


def _calculation(recipe: Recipe, problem: int) -> list[tuple[str, bool]]:
    numbers = operands(recipe.seed, problem, calculator.OPERANDS, recipe.digits)
    episode = [(calculator.question(numbers), False)]
    total = numbers[0]
    for number in numbers[1:]:
        asked = calculator.call(total, number)
        episode += [(asked, True), (calculator.reply(asked), False)]
        total += number
    return [*episode, (str(total), True), (END, True)]


def _pad(episodes: Sequence[Sequence[tuple[str, bool]]]) -> Examples:
    rows = []
    for episode in episodes:
        pieces = [([text] if text == END else list(text), own) for text, own in episode]
        rows.append([(_IDS[token], own) for tokens, own in pieces for token in tokens])
    shape = len(rows), max(map(len, rows), default=0)
    examples = Examples(np.zeros(shape, np.int64), np.zeros(shape, np.bool_))
    for index, row in enumerate(rows):
        examples.token_ids[index, : len(row)], examples.own[index, : len(row)] = zip(*row, strict=True)
    return examples
