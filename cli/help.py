"""How `--help` shows parameters: flags and arguments by their names, without Python's types."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command with plain help."""

    def get_params(self, ctx: Any) -> Any:
        """All parameters, dressed for the help."""
        return _plain(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`URI` instead of `{URI}`."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class Group(TyperGroup):
    """The program with plain help."""

    def get_params(self, ctx: Any) -> Any:
        """All parameters, dressed for the help."""
        return _plain(super().get_params(ctx))


def _plain(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False) or param.param_type_name == "argument":
            vars(param)["display_type_rich"] = lambda ctx: None  # noqa: ARG005  # what typer asks for the column of types
    return params
