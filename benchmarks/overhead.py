"""What a training step costs with masks, beside the dense step and the steps of the paper's rivals.

All methods train the same parameters in one process and take turns, a step each, in an order that changes
every round; a ratio is the median over the rounds of one step against the dense step of the same round.
The C library keeps the memory that a step frees.
Rounds are written to the output file as they end, and a run that is stopped goes on where it was.

    python -m benchmarks.overhead --model resnet18 --rounds 11
    python -m benchmarks.overhead --table --out benchmarks/results/overhead.json
    python -m benchmarks.overhead --model all --precision fp32 bf16 --mode eager compile --device cuda
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pdp_fx
from benchmarks.machine import keep_freed_memory, machine
from benchmarks.overhead_memory import measure
from benchmarks.overhead_models import METHODS, WORKLOADS, Variant, Workload, build
from benchmarks.overhead_table import Record, as_table, summary


@dataclass(frozen=True)
class Setting:
    """One table: a model under one precision, mode and device."""

    model: str
    batch: int
    precision: str
    mode: str
    device: str
    clock: str

    @property
    def title(self) -> str:
        """The key of the record and the headline of the table."""
        return f"{self.model} b{self.batch} {self.precision} {self.mode} {self.device}, {self.clock} clock"


class Runner:
    """All methods of one setting, ready to take turns."""

    def __init__(self, setting: Setting, methods: tuple[str, ...]) -> None:
        self.setting = setting
        workload = WORKLOADS[setting.model]
        torch.manual_seed(0)
        dense = workload.make().to(setting.device).train()
        self.batch = workload.example(setting.batch, setting.device)
        self.variants = {method: build(method, dense, self.batch[0]) for method in methods}
        self.shared = workload.optimizer(list(dense.parameters()))
        self.own = {name: self._own_optimizer(workload, variant) for name, variant in self.variants.items()}
        if setting.mode == "compile":
            for variant in self.variants.values():
                compiled: Any = torch.compile(variant.model, fullgraph=True)
                variant.model = compiled

    @staticmethod
    def _own_optimizer(workload: Workload, variant: Variant) -> torch.optim.Optimizer | None:
        return workload.optimizer(variant.own) if variant.own else None

    def optimizers(self, method: str) -> list[torch.optim.Optimizer]:
        """Those that this method's step uses."""
        own = self.own[method]
        return [self.shared] if own is None else [self.shared, own]

    def step(self, method: str) -> float:
        """Train one step and return its seconds."""
        gc.collect()
        optimizers = self.optimizers(method)
        self._wait()
        clock = time.process_time if self.setting.clock == "cpu" else time.perf_counter
        started = clock()
        loss = self.variants[method].loss(*self.batch, self.setting.precision)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._wait()
        return clock() - started

    def memory(self, method: str) -> dict[str, int]:
        """Bytes at the three spots; other methods' tensors do not count."""
        others = sum(self._own_bytes(name) for name in self.variants if name != method)
        spots = measure(self.variants[method], self.optimizers(method), self.batch, self.setting.precision)
        self.shared.zero_grad()
        on_gpu = self.setting.device == "cuda"
        return {name: size - others * on_gpu for name, size in spots.to_dict().items()}

    def schedule_step(self, method: str) -> float | None:
        """Seconds of one call of `pdp_fx.step`, which a per-step ramp adds."""
        if not method.startswith("pdp"):
            return None
        self._wait()
        started = time.perf_counter()
        pdp_fx.step(self.variants[method].model)
        self._wait()
        return time.perf_counter() - started

    def _own_bytes(self, method: str) -> int:
        own = self.own[method]
        states: list[Tensor] = [] if own is None else [t for s in own.state.values() for t in s.values()]
        base = {id(tensor) for tensor in self.variants["dense"].model.buffers()}
        buffers = [tensor for tensor in self.variants[method].model.buffers() if id(tensor) not in base]
        return sum(tensor.nbytes for tensor in [*self.variants[method].own, *states, *buffers])

    def _wait(self) -> None:
        if self.setting.device == "cuda":
            torch.cuda.synchronize()


def run(setting: Setting, methods: tuple[str, ...], rounds: int, out: Path) -> Record:
    """Bring the record of one setting to the wanted number of rounds."""
    records = load(out)
    record = records.setdefault(setting.title, {"seconds": {}, "bytes": {}, "schedule_step": {}})
    done = min((len(record["seconds"].get(method, ())) for method in methods), default=0)
    if done >= rounds:
        return record
    runner = Runner(setting, methods)
    for method in methods:
        for _ in range(2):
            runner.step(method)
        if method not in record["bytes"]:
            record["bytes"][method] = runner.memory(method)
    for number in range(done, rounds):
        order = list(methods)
        random.Random(number).shuffle(order)
        for method in order:
            record["seconds"].setdefault(method, [])[number:] = [runner.step(method)]
        save(out, records)
    for method in methods:
        record["schedule_step"][method] = runner.schedule_step(method)
    record["machine"] = machine(setting.device)
    save(out, records)
    return record


def load(out: Path) -> dict[str, Record]:
    """All records so far."""
    return json.loads(out.read_text()) if out.exists() else {}


def save(out: Path, records: dict[str, Record]) -> None:
    """Replace the file in one go, so that a run that is killed leaves a whole one."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(records, indent=1))
    part.replace(out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a training step costs with masks.")
    parser.add_argument("--model", nargs="+", default=["resnet20"], choices=[*WORKLOADS, "all"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--mode", nargs="+", default=["eager"], choices=["eager", "compile"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, help="instead of the model's own batch size")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument(
        "--clock",
        default="wall",
        choices=["wall", "cpu"],
        help="cpu: seconds of the processor, for a busy machine",
    )
    parser.add_argument("--out", type=Path, default=Path("overhead.json"))
    parser.add_argument("--table", action="store_true", help="only print a summary of the results so far")
    options = parser.parse_args(arguments)
    if options.table:
        print(summary(load(options.out)))
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    methods = tuple(method for method in METHODS if method in {"dense", *options.methods})
    for model in WORKLOADS if "all" in options.model else options.model:
        for precision in options.precision:
            for mode in options.mode:
                batch = options.batch or WORKLOADS[model].batch
                setting = Setting(model, batch, precision, mode, options.device, options.clock)
                print(as_table(setting.title, run(setting, methods, options.rounds, options.out)))


if __name__ == "__main__":
    keep_freed_memory()
    main()
