"""A picture of divergence over time, as SVG text: one thin line a run, one thick line for their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

import attrs

__all__ = [
    "Curve",
    "divergence_svg",
]

_WIDTH, _HEIGHT = 760, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 56, 52
_NUM_TICKS = 5
_COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce")
_STYLE = "font-family='system-ui, sans-serif' font-size='13' fill='#374151'"


@attrs.frozen
class Curve:
    """Runs of one kind, each a value at every sample."""

    runs: tuple[tuple[int, ...], ...]

    def mean(self) -> list[float]:
        return [sum(values) / len(values) for values in zip(*self.runs, strict=True)]


def divergence_svg(curves: Mapping[str, Curve], *, sample_steps: int, title: str, unit: str) -> str:
    """Draw curves over steps.

    Args:
        curves: name -> runs; all with the same number of samples.
        sample_steps: steps between two samples; the first is taken after that many.
        title: above the picture.
        unit: what is counted.
    """
    num_samples = max((len(run) for curve in curves.values() for run in curve.runs), default=0)
    highest = max((value for curve in curves.values() for run in curve.runs for value in run), default=0)
    top = max(1, -(-highest // _NUM_TICKS) * _NUM_TICKS)
    axes = _Axes(last_step=max(1, num_samples * sample_steps), top=top, sample_steps=sample_steps)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='#ffffff'/>",
        f"<text x='{_LEFT}' y='24' {_STYLE} font-weight='600'>{escape(title)}</text>",
        *axes.frame(unit),
    ]
    for place, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        parts += [axes.line(run, colour, width=0.8, opacity=0.3) for run in curve.runs]
        parts.append(axes.line(curve.mean(), colour, width=3.0, opacity=1.0))
        x = _LEFT + 250 * place
        parts.append(f"<rect x='{x}' y='36' width='18' height='4' fill='{colour}'/>")
        parts.append(f"<text x='{x + 24}' y='43' {_STYLE}>{escape(name)}</text>")
    return "\n".join([*parts, "</svg>", ""])


@attrs.frozen(kw_only=True)
class _Axes:
    """From steps and values to places in the picture."""

    last_step: int
    top: int
    sample_steps: int

    def x(self, step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / self.last_step

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.top

    def line(self, values: Sequence[float], colour: str, *, width: float, opacity: float) -> str:
        """Values from step 0, where all ranks are empty and equal, on."""
        steps = range(0, (len(values) + 1) * self.sample_steps, self.sample_steps)
        points = " ".join(
            f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in zip(steps, [0, *values], strict=True)
        )
        return (
            f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='{width}' "
            f"stroke-opacity='{opacity}' stroke-linejoin='round'/>"
        )

    def frame(self, unit: str) -> list[str]:
        """Grid, numbers and names of the axes."""
        parts = []
        for tick in range(_NUM_TICKS + 1):
            value, step = self.top * tick // _NUM_TICKS, self.last_step * tick // _NUM_TICKS
            y, x = self.y(value), self.x(step)
            parts += [
                f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#e5e7eb'/>",
                f"<text x='{_LEFT - 8}' y='{y + 4:.1f}' text-anchor='end' {_STYLE}>{value}</text>",
                f"<text x='{x:.1f}' y='{_HEIGHT - _BOTTOM + 20}' text-anchor='middle' {_STYLE}>{step}</text>",
            ]
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        return [
            *parts,
            f"<text x='{(_LEFT + _WIDTH - _RIGHT) / 2}' y='{_HEIGHT - 10}' text-anchor='middle' {_STYLE}>step</text>",
            f"<text x='18' y='{middle}' text-anchor='middle' transform='rotate(-90 18 {middle})' {_STYLE}>"
            f"{escape(unit)}</text>",
        ]
