"""The picture of the proof, an SVG."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from rr_dataset.demo.model_proof import ProofReport

POINTS = 200
LIVE, REPLAYED = "#c2410c", "#1d4ed8"


def draw(report: ProofReport, path: Path) -> None:
    """Left, how many tokens are further from the engine than x; right, how often both routers agree, by layer."""
    mpl.use("svg")
    with mpl.rc_context({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "rr_dataset"}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(2, 1), layout="constrained")
        for name, color, divergence in (
            ("live routing", LIVE, report.live),
            ("replayed routing", REPLAYED, report.replayed),
        ):
            values = np.maximum(divergence.per_token, 1e-9)
            picked = np.unique(np.geomspace(1, len(values), POINTS).astype(int))
            left.plot(values[-picked], picked / len(values), color=color, label=f"{name}: mean {divergence.mean:.1e}")
        left.set(
            xscale="log", yscale="log", xlabel="KL(engine || trainer) of a token, nats", ylabel="share of tokens beyond"
        )
        left.set_xlim(left=1e-7)
        left.legend(frameon=False, loc="lower left")
        layers = list(report.agreement)
        right.bar(layers, [100 * (1 - share) for share in report.agreement.values()], color=LIVE)
        right.set(
            xlabel="MoE layer",
            ylabel="choices of the engine that the\ntrainer's router does not make, %",
            xticks=layers,
        )
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
