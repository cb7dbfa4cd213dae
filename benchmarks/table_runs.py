"""The common part of all tables of trainings: train each run once, resumably, and store its record."""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from filelock import FileLock
from torch import nn

import pdp_fx
from benchmarks import results
from benchmarks.data import Batches, Images, load_cifar10, split_off
from benchmarks.machine import machine
from benchmarks.methods import FULL, SHORT
from benchmarks.resnet_cifar import ResNet20
from benchmarks.results import Record
from benchmarks.training import Feed, Settings, Trainer, own_parameters

HELD_OUT = 5000
"""Training images that are held out for tuning."""


class Keyed(Protocol):
    """What every run of a table has."""

    @property
    def key(self) -> str:
        """What tells runs apart in the results."""
        ...

    @property
    def seed(self) -> int:
        """Of the weights and batches."""
        ...

    @property
    def epochs(self) -> int:
        """Of the whole training."""
        ...

    @property
    def validated(self) -> bool:
        """Whether to measure on held out training images."""
        ...


class ImageRun(Keyed, Protocol):
    """A run on images."""

    @property
    def batch(self) -> int:
        """Images in a batch."""
        ...


AnyRun = TypeVar("AnyRun", bound=Keyed)
AnyImageRun = TypeVar("AnyImageRun", bound=ImageRun)
AnyFeed = TypeVar("AnyFeed", bound=Feed)


@dataclass
class Table(ABC, Generic[AnyRun, AnyFeed]):
    """Trains what a table asks for, each run once; what is the same for all runs is here."""

    data: Path
    out: Path
    states: Path
    settings: Settings

    @abstractmethod
    def feed(self, run: AnyRun) -> AnyFeed:
        """The batches of a run."""

    @abstractmethod
    def trainer(self, run: AnyRun, steps: int) -> Trainer:
        """The model of a run, ready to be trained, for so many steps in an epoch."""

    @abstractmethod
    def measured(self, run: AnyRun, trainer: Trainer, feed: AnyFeed) -> Record:
        """What the table shows of a run that is over, beside the `facts`."""

    def run(self, run: AnyRun) -> Record:
        """The record of a run, from the results or from training it now.

        A process that is at the same run is waited for.

        Raises:
            ValueError: the results, or the state of a run that was stopped, are of another precision.
        """
        self.states.mkdir(parents=True, exist_ok=True)
        with FileLock(self._state_of(run).with_suffix(".lock")):
            found = results.load(self.out).get(run.key)
            if found is None:
                return self.train(run)
        self._refuse_other(found["settings"]["precision"], self.out, run)
        return found

    def train(self, run: AnyRun) -> Record:
        """Train a run, from where it was stopped or from the beginning, and write its record down."""
        feed = self.feed(run)
        if len(feed) == 0:
            raise ValueError(f"{run.key}: the training data do not fill a batch; give a smaller --batch")
        trainer = self.trainer(run, len(feed))
        state = self._state_of(run)
        if state.exists():
            self._refuse_other(trainer.load(state), state, run)
        while trainer.done < run.epochs:
            loss = trainer.epoch(feed)
            left = (run.epochs - trainer.done) * trainer.seconds[-1] / 60
            print(
                f"{run.key}: epoch {trainer.done} of {run.epochs}, loss {loss:.3f}, "
                f"{trainer.seconds[-1]:.1f} s, {left:.0f} min left",
                flush=True,
            )
            trainer.save(state)
        record = facts(run, trainer) | self.measured(run, trainer, feed)
        results.add(self.out, record)
        state.unlink(missing_ok=True)
        return record

    def _state_of(self, run: AnyRun) -> Path:
        return self.states / f"{run.key.replace(' ', '_')}.pt"

    def _refuse_other(self, precision: str, place: Path, run: AnyRun) -> None:
        """Refuse what was trained in another precision: runs are not told apart by it."""
        if precision != self.settings.precision:
            raise ValueError(
                f"{place} has {run.key!r} in {precision}, but --precision is {self.settings.precision}; "
                "give another --out and other --states"
            )


@dataclass
class ImageTable(Table[AnyImageRun, Batches]):
    """On CIFAR-10."""

    @cached_property
    def images(self) -> tuple[Images, Images]:
        """The training and the test images."""
        return load_cifar10(self.data)

    def split(self, validated: bool) -> tuple[Images, Images]:
        """What to train on and what to measure on."""
        train, test = self.images
        if validated:
            train, test = split_off(train, min(HELD_OUT, len(train) // 10))
        return train.to(self.settings.device), test.to(self.settings.device)

    def feed(self, run: AnyImageRun) -> Batches:
        return Batches(self.split(run.validated)[0], run.batch, run.seed)

    def network(self, seed: int) -> nn.Module:
        """The untrained net of a seed, the same for all methods."""
        torch.manual_seed(seed)
        return ResNet20().to(self.settings.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def positive(text: str) -> int:
    """The whole number above 0 that an option is.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def table_parser(
    description: str, name: str, *, data: str, states: str, rate: float, batch: int, precision: str
) -> argparse.ArgumentParser:
    """The options that all tables have.

    Args:
        description: what the table shows.
        name: of the file of its results.
        data: what the folder of the data holds.
        states: where runs are kept that are not over.
        rate: the default peak learning rate.
        batch: the default batch size.
        precision: the default precision, fp32 or bf16.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=Path("data"), help=f"folder with {data}")
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{name}.jsonl"))
    parser.add_argument("--states", type=Path, default=Path(states), help="for runs that are not over")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--validate", action="store_true", help="hold out training data: for tuning")
    parser.add_argument("--rate", type=float, default=rate, help="peak learning rate")
    parser.add_argument("--batch", type=positive, default=batch)
    parser.add_argument("--precision", default=precision, choices=["fp32", "bf16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--table", action="store_true", help="only print the results so far")
    return parser


def image_parser(description: str, name: str) -> argparse.ArgumentParser:
    """The options that all tables of CIFAR-10 have; see `epochs_of`."""
    parser = table_parser(
        description, name, data="CIFAR-10", states="out/cifar", rate=0.4, batch=128, precision="bf16"
    )
    parser.add_argument("--short", action="store_true", help=f"{SHORT} epochs instead of --epochs")
    parser.add_argument("--epochs", type=positive, default=FULL)
    return parser


def epochs_of(options: argparse.Namespace) -> int:
    """How many epochs the options of an `image_parser` ask for."""
    return SHORT if options.short else options.epochs


def parsed(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line; the number of threads is set."""
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def mean_seconds(trainer: Trainer) -> float:
    """Of an epoch; 0 without one."""
    return sum(trainer.seconds) / max(len(trainer.seconds), 1)


def facts(run: Keyed, trainer: Trainer) -> Record:
    """What the record of every run tells, whatever the table."""
    by_epoch = {"losses": trainer.losses, "flips": trainer.flips, "pruned": trainer.pruned}
    return {
        "key": run.key,
        **asdict(cast(Any, run)),
        "extra": sum(parameter.numel() for parameter in own_parameters(trainer.model)),
        "seconds": mean_seconds(trainer),
        **{name: [round(value, 6) for value in values] for name, values in by_epoch.items()},
        "weights": trainer.weights,
        "settings": asdict(trainer.settings),
        "machine": machine(trainer.settings.device),
        "date": time.strftime("%Y-%m-%d"),
    }


def converted(model: nn.Module) -> nn.Module:
    """What `convert` gives; a model that has diverged as it is, so that its record tells of it."""
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return pdp_fx.convert(model) if finite else model
