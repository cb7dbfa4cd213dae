"""A training run that saves itself after every step and goes on where the last checkpoint ends.

Run as a script, it waits a little in each step, so that a test has the time to kill it in the middle.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import fx

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule, Unstructured
from tests.training.nets import Net, batch, sgd, training_step

STEPS = 40
SPEC = PruneSpec(
    Unstructured(0.8),
    overrides={"head": Channels(ratio=0.5), "inner": NM(2, 4), "stem": Channels(ratio=0.5)},
    schedule=Schedule(start=4, epsilon=1 / 30, per="step"),
)


def run(checkpoint: Path | None = None, pause: float = 0.0) -> fx.GraphModule:
    """Train for `STEPS` steps in total; the batches of each depend on its number and on the generator."""
    torch.manual_seed(0)
    model = pdp_fx.prepare(Net(), SPEC, batch()[0])
    optimizer = sgd(model)
    done = 0
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["generator"])
        done = saved["done"]
    for number in range(done, STEPS):
        training_step(model, optimizer, int(torch.randint(1000, ())) + number)
        if checkpoint is not None:
            _save(checkpoint, model, optimizer, number + 1)
        time.sleep(pause)
    return model


def _save(checkpoint: Path, model: fx.GraphModule, optimizer: torch.optim.Optimizer, done: int) -> None:
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generator": torch.get_rng_state(),
        "done": done,
    }
    torch.save(saved, checkpoint.with_suffix(".part"))
    os.replace(checkpoint.with_suffix(".part"), checkpoint)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), float(sys.argv[2]))
