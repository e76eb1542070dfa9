"""Laws through measured points: which fixed cost, which cost per token or byte explain the times?

Theory of operation
-------------------
A law is a sum of terms, each a coefficient that is not negative times a known column (1, tokens, pairs, bytes). `fit`
finds the coefficients with the least mean *relative* error, because a table of times spans orders of magnitude and 10 %
of a short time matters as much as 10 % of a long one. Least absolute error, not least squares: one bad point of a table
read off a plot must not bend the law.

1. Weighted least squares with weights 1/time.
2. Again and again, each point weighted by 1/sqrt(its relative error): the minimum of the sum of absolute errors
   (iteratively reweighted least squares; Schlossmacher, JASA 68, 1973).
3. A term that came out negative is no cost: the most negative leaves, and the rest is fitted again.

`held_out` is how the published tables are judged: parameters from every second point beginning with the first, so that
both ends are inside the fit where the count is odd, and the error on the points between them.

Needs numpy; pure, no chance, no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError

Array = npt.NDArray[np.float64]
ROUNDS = 60
ERROR_LEAST = 1e-4  # a point that fits better weighs no more: keeps the weights finite


@dataclass(frozen=True, slots=True)
class Fit:
    """`coefficients` per column, none negative; `errors` are relative, of the points asked for."""

    coefficients: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def error_mean(self) -> float:
        return sum(self.errors) / len(self.errors)


def fit(columns: Sequence[Sequence[float]], times: Sequence[float]) -> Fit:
    """Coefficients of the terms from these points; the errors are those on the same points."""
    matrix, wanted = _checked(columns, times)
    coefficients = _not_negative(matrix, wanted)
    return Fit(tuple(coefficients.tolist()), _errors(matrix, wanted, coefficients))


def held_out(columns: Sequence[Sequence[float]], times: Sequence[float], first: int = 0) -> Fit:
    """Coefficients from points first, first + 2, ...; the errors are those on the other half."""
    matrix, wanted = _checked(columns, times)
    used = np.arange(len(wanted)) % 2 == first
    coefficients = _not_negative(matrix[used], wanted[used])
    return Fit(tuple(coefficients.tolist()), _errors(matrix[~used], wanted[~used], coefficients))


def _checked(columns: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[Array, Array]:
    matrix = np.array(columns, dtype=np.float64).T
    wanted = np.array(times, dtype=np.float64)
    if matrix.ndim != 2 or len(matrix) != len(wanted):
        raise ConfigError(f"a law needs as many points in each column as times: {len(wanted)} times")
    terms = matrix.shape[1]
    if len(wanted) <= terms:
        raise ConfigError(f"{len(wanted)} points are too few for {terms} terms: measure more")
    if not np.isfinite(matrix).all() or not np.isfinite(wanted).all() or not (wanted > 0).all():
        raise ConfigError("measured times must be finite and above 0")
    return matrix, wanted


def _not_negative(matrix: Array, wanted: Array) -> Array:
    kept = list(range(matrix.shape[1]))
    found = _least_absolute(matrix, wanted)
    while kept and found.min() < 0:
        del kept[int(found.argmin())]
        found = _least_absolute(matrix[:, kept], wanted)
    coefficients = np.zeros(matrix.shape[1])
    coefficients[kept] = found
    return coefficients


def _least_absolute(matrix: Array, wanted: Array) -> Array:
    weights: Array = np.ones(len(wanted))
    found: Array = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        scale = weights / wanted
        found = np.asarray(np.linalg.lstsq(matrix * scale[:, None], weights, rcond=None)[0], dtype=np.float64)
        error = np.abs(matrix @ found / wanted - 1)
        weights = 1 / np.sqrt(np.maximum(error, ERROR_LEAST))
    return found


def _errors(matrix: Array, wanted: Array, coefficients: Array) -> tuple[float, ...]:
    return tuple(np.abs(matrix @ coefficients / wanted - 1).tolist())
