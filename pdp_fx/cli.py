"""The command line: ``python -m pdp_fx``."""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pdp_fx", description="A torch.fx compiler for train-time pruning.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train, prune and convert a small net on handwritten digits")
    demo.add_argument("--out", type=Path, default=Path("out"), help="folder for models, table and plots")
    demo.add_argument("--epochs", type=int, default=None, help="epochs of each training run")
    demo.add_argument("--seeds", type=int, default=3, help="number of seeds")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    # The demo draws plots; importing the package must not need matplotlib.
    run = importlib.import_module("pdp_fx.demo").run
    run(given.out, epochs=given.epochs, seeds=given.seeds)
    return 0
