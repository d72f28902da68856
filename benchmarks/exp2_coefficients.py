"""The polynomials of kernels/exp2.py: `python -m hopwell.benchmarks.exp2_coefficients`.

2**f on [0, 1] as 1 + c1 f + ... + cd f**d, of the smallest relative error that a degree allows, by
Remez' exchange. The constant is fixed: 2 to a whole number comes out exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DEGREES = (3, 4, 5)
_POINTS = 1 << 16
_ROUNDS = 12  # the exchange stands still after 5


def minimax(degree: int) -> tuple[float, ...]:
    """(1, c1, ..., cd), for float32."""
    f = np.arange(1, _POINTS + 1) / _POINTS
    weight = np.exp2(-f)
    powers = f[:, None] ** np.arange(1, degree + 1) * weight[:, None]
    # Relative error: powers @ c - wanted. It alternates over degree + 1 points, one for every c
    # and one for its size; at first those of a Chebyshev polynomial.
    wanted = 1 - weight
    signs = (-1.0) ** np.arange(degree + 1)
    angles = np.pi * (1 - np.arange(degree + 1) / (degree + 1))
    at = ((1 + np.cos(angles)) / 2 * (_POINTS - 1)).astype(int)
    at[0] = 1
    c = np.zeros(degree)
    for _ in range(_ROUNDS):
        c = np.linalg.solve(np.column_stack([powers[at], signs]), wanted[at])[:degree]
        error = powers @ c - wanted
        pieces = np.split(np.arange(_POINTS), np.flatnonzero(np.diff(np.sign(error))) + 1)
        at = np.array([piece[np.argmax(np.abs(error[piece]))] for piece in pieces])
    return (1.0, *(float(str(np.float32(x))) for x in c))  # the shortest that rounds to it


def relative_error(coefficients: tuple[float, ...], f: NDArray[np.float64]) -> float:
    """The largest for these f, computed in float64."""
    value = np.polynomial.polynomial.polyval(f, np.array(coefficients, np.float32))
    return float(np.abs(value * np.exp2(-f) - 1).max())


def main() -> None:
    grid = np.linspace(0, 1, _POINTS + 1)
    for degree in DEGREES:
        coefficients = minimax(degree)
        numbers = ", ".join(map(repr, coefficients))
        print(f"    {degree}: ({numbers}),  # {relative_error(coefficients, grid):.2e}")


if __name__ == "__main__":
    main()
