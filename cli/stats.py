"""`rr-dataset stats`: how evenly the experts of each layer are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import rr_dataset as rr

from . import output
from .options import Json, Layers, Prefix, Uri, parse_layers

_SHOWN_DEAD = 8


def stats(
    uri: Uri,
    prefix: Prefix = None,
    layers: Layers = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw layers by experts there (extra: plot)", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Count how often each expert was chosen, layer by layer."""
    plotter = None if plot is None else _Plotter()  # first, so that a missing package is told at once
    chosen = None if layers is None else parse_layers(layers)
    with output.progress("count") as progress:
        loads = rr.layer_loads(uri, prefix, chosen, progress=progress)
    if plot is not None and plotter is not None:
        plotter.draw(loads, plot)
    if as_json:
        values = [{**asdict(load), "max_over_mean": load.max_over_mean, "dead": list(load.dead)} for load in loads]
        output.show_json(values)
        return
    output.show_table(("layer", "tokens", "max/mean", "busiest", "dead experts"), [_cells(load) for load in loads])
    if plot is not None:
        output.show_line(f"wrote {plot}")


def _cells(load: rr.LayerLoad) -> Sequence[object]:
    dead = load.dead
    named = ", ".join(map(str, dead[:_SHOWN_DEAD])) + (" ..." if len(dead) > _SHOWN_DEAD else "")
    return (
        load.layer,
        f"{load.tokens:,}",
        f"{load.max_over_mean:.2f}",
        f"{load.busiest} ({load.counts[load.busiest]:,})",
        f"{len(dead)}: {named}" if dead else "none",
    )


class _Plotter:
    """Draws loads as a heat map: 1 is the mean of a layer."""

    def __init__(self) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise rr.InvalidInputError("--plot needs matplotlib: pip install 'rr-dataset[plot]'") from error
        self._figure = Figure

    def draw(self, loads: Sequence[rr.LayerLoad], path: Path) -> None:
        """Write the picture."""
        shares = [[count * len(load.counts) / max(sum(load.counts), 1) for count in load.counts] for load in loads]
        figure = self._figure(figsize=(10, 1.5 + 0.12 * len(loads)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(shares or [[0.0]], aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set_yticks(range(len(loads)), [str(load.layer) for load in loads], fontsize=6)
        axes.set_xlabel("expert")
        axes.set_ylabel("layer")
        figure.colorbar(image, label="load / mean of the layer")
        figure.savefig(path)
