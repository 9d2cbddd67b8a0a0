"""`rr-dataset demo --model`: what the proof on a real model found."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rr_dataset.errors import InvalidInputError

from . import output

if TYPE_CHECKING:
    from rr_dataset.demo.model_proof import ProofReport
    from rr_dataset.demo.model_trainer import Divergence, PolicySteps


def demo_model(uri: str, seed: int, picture: Path | None, *, as_json: bool) -> None:
    """Run the proof, show it, and draw it if asked to."""
    for module, extra in (("paddle", "paddle"), *([("matplotlib", "plot")] if picture else [])):
        if find_spec(module) is None:
            raise InvalidInputError(f"this needs {module}: pip install 'rr-dataset[{extra}]'")
    warnings.filterwarnings("ignore", "No ccache found")  # paddle, of something that is compiled nowhere here
    from rr_dataset.demo.model_proof import prove

    if not as_json:
        output.show_line(
            "a MoE language model (4 layers, 32 experts, top-4, 1.7 M parameters) learns Python's library, on the CPU"
        )
    report = prove(uri, seed=seed)
    if picture:
        from rr_dataset.demo.model_picture import draw

        draw(report, picture)
    if as_json:
        output.show_json(_without_tokens(report))
    else:
        _show(report, uri)
    if not report.sound:
        raise typer.Exit(output.EXIT_FOUND_PROBLEMS)


def _show(report: ProofReport, uri: str) -> None:
    output.show_facts(
        {
            "  trained": f"{report.train_s:.0f} s, loss {report.loss_first:.2f} to {report.loss_last:.2f} nats per byte",
            "  rolled out": f"{report.rollout_s:.0f} s in bf16 with a KV cache: {report.requests} requests, {report.tokens:,} tokens, "
            f"{output.shown_bytes(report.payload_bytes)} of routing through {uri}",
        }
    )
    output.show_line("\ntrainer's fp32 forward against the engine, KL in nats per token")
    output.show_facts(
        {
            "  live routing": _shown(report.live),
            "  replayed": f"{_shown(report.replayed)}, {100 * report.coverage:.0f} % of rows",
            "  one token late": f"{_shown(report.shifted)} (wrong on purpose)",
            "  wrong flattening": f"{_shown(report.transposed)} (wrong on purpose)",
        }
    )
    output.show_line("\nthe live router's choices that are the engine's too")
    layers = {f"  layer {layer}": f"{100 * share:.1f} %" for layer, share in report.agreement.items()}
    output.show_facts(
        layers | {"  tokens": f"{100 * report.tokens_flipped:.0f} % choose another expert in at least one layer"}
    )
    output.show_line("\npolicy gradient, from the same weights")
    output.show_facts(
        {"  live routing": _shown_steps(report.live_steps), "  replayed": _shown_steps(report.replayed_steps)}
    )
    if not report.sound:
        output.show_line(
            "\nTHIS IS NOT AS IT SHOULD BE: replay must be nearer, wrong rows far off, and both ways must train"
        )


def _shown(divergence: Divergence) -> str:
    return f"mean {divergence.mean:.1e}, largest {divergence.largest:.1e}"


def _shown_steps(steps: PolicySteps) -> str:
    gradients = ", ".join(f"{norm:.1e}" for norm in steps.router_gradients)
    return (
        f"ratio to the engine off by {steps.ratio_error:.1e} on average, {steps.ratio_largest:.1e} at most; "
        f"router gradients {gradients}"
    )


def _without_tokens(report: ProofReport) -> dict[str, Any]:
    values = asdict(report)
    for name in ("live", "replayed", "shifted", "transposed"):
        del values[name]["per_token"]
    return values
