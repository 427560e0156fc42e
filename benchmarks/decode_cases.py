"""The cases of the decode benchmarks, and the options that choose them. Knows no system."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.report import parser
from benchmarks.shapes import SHAPES


@dataclass(frozen=True)
class Case:
    """All rows start together and decode `steps` tokens; `name` is batch x mean context."""

    name: str
    rows: int
    context: int
    steps: int

    @property
    def prompt(self) -> int:
        """Tokens of each prompt: the mean context lies in the middle of the window."""
        return self.context - self.steps // 2


def options(name: str, description: str | None) -> argparse.ArgumentParser:
    """The common options, and the shape, the cases, and their steps."""
    made = parser(name, description)
    made.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    made.add_argument(
        "--cases",
        default="32x4096,32x1024,1x1024,256x1024",
        help="batch x mean context, with commas",
    )
    made.add_argument("--steps", type=int, default=200, help="tokens that each row decodes")
    return made


def cases(chosen: argparse.Namespace) -> list[Case]:
    """Raises ValueError on a malformed case, and on one shorter than half its steps."""
    made = []
    for name in chosen.cases.split(","):
        rows, context = map(int, name.split("x"))
        made.append(Case(name, rows, context, chosen.steps))
        if made[-1].prompt < 1:
            raise ValueError(f"{name}: {chosen.steps} steps around that context leave no prompt.")
    return made
