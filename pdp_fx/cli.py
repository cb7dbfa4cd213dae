"""The command line: ``python -m pdp_fx``.

``demo`` trains and prunes a small net; the other commands inspect a model of the user's without training it.
A model is given as ``module:name``, the name of a module instance or of a callable that returns one.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from pdp_fx.api import prepare
from pdp_fx.drawing import draw_channels
from pdp_fx.errors import PdpError
from pdp_fx.explain import explain
from pdp_fx.printing import graph_text
from pdp_fx.report import report
from pdp_fx.spec import Channels, PruneSpec

ANY_CHANNELS = PruneSpec(Channels(ratio=0.5))
"""What ``explain`` and ``draw`` ask for unless told otherwise: every group that can be pruned is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 1 if the model or the spec is at fault, with the reason."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        text = given.run(given)
    except (PdpError, OSError, ImportError) as err:
        print(f"pdp_fx {given.command}: {err}", file=sys.stderr)
        return 1
    if text:
        print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pdp_fx", description="A torch.fx compiler for train-time pruning."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser("demo", help="train, prune and convert a small net on handwritten digits")
    demo.add_argument("--out", type=Path, default=Path("out"), help="folder for models, table and plots")
    demo.add_argument("--epochs", type=_count, default=None, help="epochs of each training run")
    demo.add_argument("--seeds", type=_count, default=3, help="number of seeds")
    demo.set_defaults(run=_demo)
    _add(commands, "graph", _graph, "print a model's graph; with a spec, as prepare rewrites it")
    _add(commands, "explain", _explain, "print what a spec prunes, what stays, and why")
    _add(commands, "report", _report, "print weights and multiply-accumulates of each layer").add_argument(
        "--json", action="store_true", help="as JSON"
    )
    _add(commands, "draw", _draw, "draw the channel groups (needs matplotlib)").add_argument(
        "--out", type=_picture, nargs="+", default=[Path("channels.svg")], help="files to write: .svg, .png"
    )
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], str],
    words: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=words)
    command.add_argument("model", type=_model, help="what makes the model, as torchvision.models:resnet18")
    command.add_argument(
        "--input",
        type=_tensor,
        action="append",
        default=[],
        help="an example input by its shape, as 1x3x224x224 or 1x16:int64; repeat it for several inputs",
    )
    command.add_argument("--spec", type=Path, default=None, help="a spec in a .toml or .json file")
    command.set_defaults(run=run)
    return command


def _demo(given: argparse.Namespace) -> str:
    # The demo draws plots; importing the package must not need matplotlib.
    importlib.import_module("pdp_fx.demo").run(given.out, epochs=given.epochs, seeds=given.seeds)
    return ""


def _graph(given: argparse.Namespace) -> str:
    return graph_text(_as_asked(given, None), _inputs(given))


def _explain(given: argparse.Namespace) -> str:
    return str(explain(_as_asked(given, ANY_CHANNELS)))


def _report(given: argparse.Namespace) -> str:
    found = report(_as_asked(given, None), _inputs(given))
    return found.to_json() if given.json else str(found)


def _draw(given: argparse.Namespace) -> str:
    prepared = _as_asked(given, ANY_CHANNELS)
    for path in given.out:
        draw_channels(prepared, path)
    return f"wrote {', '.join(map(str, given.out))}"


def _as_asked(given: argparse.Namespace, default: PruneSpec | None) -> nn.Module:
    """The model, prepared by the spec that was given or else by the default; as it is without one."""
    try:
        model: nn.Module = given.model()
    except Exception as err:
        raise PdpError(f"the model cannot be made: {type(err).__name__}: {err}") from err
    spec = default if given.spec is None else PruneSpec.load(given.spec)
    return model if spec is None else prepare(model, spec, _inputs(given))


def _inputs(given: argparse.Namespace) -> tuple[Tensor, ...] | None:
    return tuple(given.input) or None


def _model(text: str) -> Callable[[], nn.Module]:
    place, _, name = text.partition(":")
    if not place or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: write module:name, as torchvision.models:resnet18")
    try:
        made: object = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError) as err:
        raise argparse.ArgumentTypeError(str(err)) from err
    except Exception as err:
        said = f"{place} cannot be imported: {type(err).__name__}: {err}"
        raise argparse.ArgumentTypeError(said) from err
    if isinstance(made, nn.Module):
        return lambda: made
    if not callable(made):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a model nor something that makes one")
    return cast(Callable[[], nn.Module], made)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _picture(text: str) -> Path:
    if Path(text).suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{text!r} ends neither in .svg nor in .png")
    return Path(text)


def _tensor(text: str) -> Tensor:
    """A tensor of the shape and type that a text gives: normal random numbers, or zeros if they are whole."""
    sizes, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    try:
        shape = [int(size) for size in sizes.split("x")]
    except ValueError:
        shape = []
    if not shape or min(shape) < 1 or not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r}: write the shape as 1x3x224x224 or 1x16:int64")
    try:
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    except (RuntimeError, TypeError) as err:
        said = next(iter(str(err).splitlines()), "")
        raise argparse.ArgumentTypeError(f"{text!r}: no such tensor can be made: {said}") from err
