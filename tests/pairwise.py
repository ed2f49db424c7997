"""Which of many combinations ``make test`` runs; ``make long`` runs the others."""

import itertools

import pytest


def pairwise(**axes):
    """A parametrization by all combinations of some values. Those that ``make test`` runs have, between them, each
    value of an axis with each value of each other one.
    """
    places = list(itertools.product(*(range(len(values)) for values in axes.values())))
    kept, missing = set(), {pair for place in places for pair in _pairs(place)}
    while missing:
        best = max(places, key=lambda place: len(missing & _pairs(place)))
        kept.add(best)
        missing -= _pairs(best)
    cases = [
        pytest.param(*case, marks=() if place in kept else pytest.mark.long)
        for place, case in zip(places, itertools.product(*axes.values()), strict=True)
    ]
    return pytest.mark.parametrize(tuple(axes), cases)


def _pairs(place):
    return set(itertools.combinations(enumerate(place), 2))
