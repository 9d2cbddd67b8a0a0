"""`rr-dataset demo`: real routing, from an engine process to a trainer process."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rr_dataset.demo.engine import EngineReport
from rr_dataset.demo.replay import Replay
from rr_dataset.demo.trainer import ReadReport, TrainerReport

from . import output
from .demo_model import demo_model
from .options import Json


def demo(
    uri: Annotated[
        str | None,
        typer.Argument(
            metavar="URI",
            help="Where the dataset goes and stays",
            show_default="demo-dataset, with --model demo-model-dataset",
        ),
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0, metavar="N", help="Requests that finish per second; 0: without a pause")
    ] = 100.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the order in which requests finish")] = 0,
    model: Annotated[
        bool,
        typer.Option("--model", help="Train a small MoE model and replay its routing; a minute or two, needs paddle"),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --model: draw an SVG, needs matplotlib", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay 200 requests of real MoE routing as traffic, read them in another process, compare."""
    if model:
        demo_model(uri or "demo-model-dataset", seed, picture, as_json=as_json)
        return
    if picture:
        raise typer.BadParameter("only --model has a picture", param_hint="--picture")
    uri = uri or "demo-dataset"
    with Replay(uri, rate, seed) as replay:
        if as_json:
            engine, trainer = replay.engine(), replay.trainer()
            output.show_json({"engine": asdict(engine), "trainer": asdict(trainer)})
        else:
            output.show_line(f"200 requests of real routing (8 layers, 64 experts, top-8) go through {uri}")
            _show_engine(replay.engine())
            trainer = replay.trainer()
            _show_trainer(trainer)
            _show_next(uri, trainer.example_id)
    if trainer.batch.different or trainer.everything.different:
        raise typer.Exit(output.EXIT_FOUND_PROBLEMS)


def _show_engine(report: EngineReport) -> None:
    dropped = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items()) or "none"
    output.show_line(f"\nengine, process {report.pid}")
    output.show_facts(
        {
            "  put": f"{report.records} records, {report.tokens:,} tokens, {output.shown_bytes(report.payload_bytes)}",
            "  put latency": f"median {report.put_median_us:.0f} us, p99 {report.put_p99_us:.0f} us",
            "  flush": f"{report.durable} records durable, {dropped} dropped, after {report.flush_ms:.0f} ms",
        }
    )


def _show_trainer(report: TrainerReport) -> None:
    different = report.batch.different + report.everything.different
    output.show_line(f"\ntrainer, process {report.pid}")
    output.show_facts(
        {
            "  put to visible": f"median {report.visible_median_ms:.0f} ms, p99 {report.visible_p99_ms:.0f} ms",
            "  read a batch": _shown_read(report.batch),
            "  read everything": _shown_read(report.everything),
            "  compared": f"{different} RECORDS DIFFER FROM THE SOURCE" if different else "all as the engine had them",
        }
    )


def _shown_read(report: ReadReport) -> str:
    return (
        f"{report.records} records, {report.layers} layers, {report.tokens:,} tokens: "
        f"{output.shown_bytes(report.payload_bytes)} in {report.seconds * 1e3:.1f} ms, "
        f"{report.records / report.seconds:,.0f} records/s, {output.shown_bytes(report.payload_bytes / report.seconds)}/s"
    )


def _show_next(uri: str, request_id: str) -> None:
    program, place = shlex.quote(_program()), shlex.quote(uri)
    output.show_line("\nThe dataset stays. Look at it:")
    for command in (f"info {place}", f"ls {place} --long", f"get {place} {shlex.quote(request_id)}"):
        output.show_line(f"  {program} {command}")


def _program() -> str:
    """What starts this program again in the user's shell, which may not have entered the virtual environment."""
    return "rr-dataset" if shutil.which("rr-dataset") else os.path.relpath(Path(sys.executable).with_name("rr-dataset"))
