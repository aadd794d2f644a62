"""Monotone surfaces through measured seconds: by size, batch and context. Plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Point", "Surface", "isotonic"]

Point = tuple[int, int, int, float]
"""(size, batch, context, seconds)"""


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to this one in squares: neighbours out of order share their mean.

    Pool adjacent violators (Ayer et al. 1955). Order-preserving: larger values give a larger result.
    """
    pools: list[tuple[float, int]] = []  # mean, number of values
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] >= mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


class Surface:
    """Seconds by size, batch and context; never falls as one of them grows. See `cost.CostModel` for its edges."""

    def __init__(self, points: Sequence[Point]) -> None:
        assert points, "a surface needs a point"
        self._batches = sorted({batch for _, batch, _, _ in points})
        self._planes = [_fitted([point for point in points if point[1] == batch]) for batch in self._batches]

    @property
    def largest_batch(self) -> int:
        return self._batches[-1]

    def at(self, size: float, batch: int, context: int) -> float:
        """Seconds at a point, measured or not."""
        upper = min(bisect_left(self._batches, batch), len(self._batches) - 1)
        below = max((plane.at(size, context) for plane in self._planes[:upper]), default=0.0)
        value = max(below, self._planes[upper].at(size, context))
        if not upper or batch >= self._batches[upper]:
            return value
        low, high = self._batches[upper - 1 : upper + 1]
        return below + (value - below) * (batch - low) / (high - low)


@dataclass(frozen=True, slots=True)
class _Plane:
    """One batch size: at each measured size a line over the context. Bases and slopes rise with the size."""

    sizes: list[int]
    bases: list[float]  # seconds at the shortest context
    slopes: list[float]  # seconds per token of context
    start: int  # the shortest context

    def at(self, size: float, context: int) -> float:
        base = _between(self.sizes, self.bases, size)
        beyond = context - self.start
        return base + beyond * _between(self.sizes, self.slopes, size) if beyond > 0 else base


def _fitted(points: Sequence[Point]) -> _Plane:
    """Lines through the points. No base is below all measured seconds: noise must not make a pass cost nothing."""
    least = min(seconds for _, _, _, seconds in points)
    start = min(context for _, _, context, _ in points)
    sizes = sorted({size for size, _, _, _ in points})
    lines = [[(context - start, seconds) for size, _, context, seconds in points if size == each] for each in sizes]
    slopes = isotonic([_slope(line) for line in lines])
    bases = [sum(y - slope * x for x, y in line) / len(line) for line, slope in zip(lines, slopes, strict=True)]
    return _Plane(sizes, [max(least, base) for base in isotonic(bases)], slopes, start)


def _slope(line: Sequence[tuple[int, float]]) -> float:
    """Least squares, not below 0; 0 where there is one context."""
    x_mean, y_mean = sum(x for x, _ in line) / len(line), sum(y for _, y in line) / len(line)
    width = sum((x - x_mean) ** 2 for x, _ in line)
    return max(0.0, sum((x - x_mean) * (y - y_mean) for x, y in line) / width) if width else 0.0


def _between(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Linear between points, the first value before them, on with the mean slope of their upper half after them."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    upper = bisect_left(xs, x)
    low, high = (upper - 1, upper) if upper < len(xs) else ((len(xs) - 1) // 2, len(xs) - 1)
    slope = (ys[high] - ys[low]) / (xs[high] - xs[low])
    return ys[high] + slope * (x - xs[high]) if upper == len(xs) else ys[low] + slope * (x - xs[low])
