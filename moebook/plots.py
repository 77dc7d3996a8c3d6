"""Pictures of one family. Takes arrays and verdicts; each function returns its Axes.

A chapter sets the look with `plt.style.use("moebook.house")`. Every picture also reads
in grey: lines differ by dash, fields by lightness.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

INK, ACCENT, STEEL, GREY, PAPER = "#1b2a3a", "#c2410c", "#2f5d8a", "#8a929b", "#fbfaf7"
#: From paper to accent to ink: lightness falls all the way, so it prints in grey.
HEAT = LinearSegmentedColormap.from_list("heat", [PAPER, "#f0b48a", ACCENT, "#4a1804"])


def grid(half_width: float = 3.0, points: int = 241) -> np.ndarray:
    """Points of a square around the origin, row by row, (points**2, 2). Source: ours.

    Evaluate a function on it, reshape to (points, points), and give it to `plane`.
    """
    side = np.linspace(-half_width, half_width, points)
    return np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)


def plane(
    values: np.ndarray,
    half_width: float = 3.0,
    *,
    levels: Sequence[float] = (),
    cmap=HEAT,
    limits: tuple[float | None, float | None] = (None, None),
    ax: Axes | None = None,
) -> Axes:
    """A field on the square, (p, p) -> Axes, with contour lines at `levels`."""
    ax = ax or plt.subplots(figsize=(4.4, 4.2))[1]
    reach = (-half_width, half_width)
    ax.imshow(
        values,
        origin="lower",
        extent=(*reach, *reach),
        cmap=cmap,
        vmin=limits[0],
        vmax=limits[1],
        interpolation="bilinear",
    )
    if len(levels):
        side = np.linspace(*reach, values.shape[0])
        ax.contour(side, side, values, levels=levels, colors=INK, linewidths=0.8)
    ax.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
    return ax


def ladder(
    scales: Sequence[float],
    estimates: Sequence,
    *,
    label: str = "",
    color: str = ACCENT,
    marker: str = "o",
    ax: Axes | None = None,
) -> Axes:
    """Measured points with bars of one resolution against a scale -> Axes."""
    ax = ax or plt.subplots()[1]
    ax.errorbar(
        scales,
        [e.value for e in estimates],
        yerr=[e.resolution for e in estimates],
        fmt=marker,
        color=color,
        capsize=2.5,
        linestyle="none",
        label=label,
        zorder=3,
    )
    return ax


def name_line(ax: Axes, x: float, y: float, text: str, **style) -> Axes:
    """Write a curve's name beside its end, in place of a legend -> Axes."""
    style = {"xytext": (5, 0), "va": "center", "fontsize": 10, **style}
    ax.annotate(text, (x, y), textcoords="offset points", **style)
    return ax


def verdict(found, *, ax: Axes | None = None) -> Axes:
    """A verdict on a number line: target, evidence, controls, each with its bar."""
    record = found.record()
    rows = [("evidence", record, ACCENT)]
    rows += [(control["name"], control, GREY) for control in record["controls"]]
    ax = ax or plt.subplots(figsize=(6.4, 0.9 + 0.42 * len(rows)))[1]
    for height, (name, row, color) in enumerate(reversed(rows)):
        ax.plot([row["low"], row["high"]], [height] * 2, color=color, lw=5, ls="-")
        ax.plot(row["value"], height, "o", color=color, mec=INK, mew=0.8, zorder=3)
        ax.annotate(
            name,
            (row["high"], height),
            textcoords="offset points",
            xytext=(9, 0),
            va="center",
            color=INK,
            fontsize=10,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
        )
    ax.axvline(record["target"], color=INK, lw=1.1, ls="-", zorder=1)
    # Matplotlib's TeX knows only the long names of the two relations.
    quantity = re.sub(r"\\(le|ge)(?![a-z])", r"\\\1q", record["quantity"])
    ax.set(yticks=[], ylim=(-0.6, len(rows) - 0.4), xlabel=f"${quantity}$")
    ax.spines["left"].set_visible(False)
    ax.margins(x=0.25)
    ax.set_title(f"{record['label']}: {record['outcome']}", fontsize=10)
    return ax
