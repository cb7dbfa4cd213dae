"""Measure one model: prepare, a few training steps, convert, and compare; then the peer on the same model.

Runs in a process of its own, which the parent may kill. Every part prints one JSON object, so that
what was measured before a crash is not lost. Seconds are those of the processor, on one thread.
"""

from __future__ import annotations

import copy
import json
import math
import re
import resource
import sys
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

import pdp_fx
from benchmarks.zoo_models import Subject, build
from benchmarks.zoo_outputs import TOLERANCE, Arguments, call, difference, in_dtype, mmacs, verdict
from benchmarks.zoo_peer import measure_peer
from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.errors import PassError, PdpError, VerifyError
from pdp_fx.measuring import rounding_effect
from pdp_fx.proving import allowed_for
from pdp_fx.pruner import find
from pdp_fx.trace import trace
from pdp_fx.tracing.examples import example_call

SPECS = {
    "channels": pdp_fx.Channels(ratio=0.5),
    "streams": pdp_fx.Channels(ratio=0.5, through_norms=True),
    "unstructured": pdp_fx.Unstructured(0.5),
    "nm": pdp_fx.NM(2, 4),
}
TRAINED_ON = 2
"""Examples in a batch; models are traced on one, to see that a graph keeps no batch size."""
MOST_PARAMETERS = 150_000_000
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What to measure: a model, a granularity, a dtype, and whether the peer is asked too."""

    zoo: str
    name: str
    granularity: str = "channels"
    double: bool = False
    peer: bool = True
    gigabytes: float = 8


def peak_mb() -> int:
    """Most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def liven(model: nn.Module, inputs: Arguments) -> None:
    """Give norms statistics of real activations, and scales and shifts that matter."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        call(model.train(), inputs)
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        if norm.running_var is not None:
            # Two examples of one pixel may be all but equal; trained models divide by no such variance.
            norm.running_var.clamp_(min=float(norm.running_var.mean()) / 10)


def train(model: nn.Module, batches: list[Arguments]) -> None:
    """Small steps of gradient descent in train mode."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    for batch in batches:
        optimizer.zero_grad()
        sum((out.square().mean() for out in call(model.train(), batch)), torch.zeros(())).backward()
        # In a chain of a thousand layers gradients overflow.
        if bool(nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()):
            optimizer.step()


def measure(job: Job) -> None:
    """Print the results of one job, part by part."""
    torch.manual_seed(0)
    subject = build(job.zoo, job.name)
    size = sum(p.numel() for p in subject.model.parameters())
    report({"parameters": size})
    if size > MOST_PARAMETERS:
        report({"status": "skipped: more than 150 M parameters"})
        return
    dtype = torch.float64 if job.double else torch.float32
    draw = _drawing(subject, dtype)
    model = subject.model.to(dtype)
    example, other = draw(1), draw(TRAINED_ON)
    liven(model, other)
    dense = mmacs(model, example)
    report({"mmacs": dense, "memory_model_mb": peak_mb()})
    shapes = [tensor.shape for tensor in model.state_dict().values()]
    peer = copy.deepcopy(model) if job.peer else None
    _guarded(lambda: _measure_ours(job, model, draw, (example, other), dense))
    report(
        {"memory_mb": peak_mb(), "intact": shapes == [tensor.shape for tensor in model.state_dict().values()]}
    )
    if peer is not None:
        started = time.process_time()
        report({"peer_status": "killed"})
        found = measure_peer(peer, example, other)
        smaller = found.pop("model", None)
        if isinstance(smaller, nn.Module):
            found["peer_macs_removed"] = 1 - mmacs(smaller, example) / dense
        report(found | {"peer_total_s": time.process_time() - started})


def _drawing(subject: Subject, dtype: torch.dtype) -> Any:
    return lambda batch: in_dtype(subject.inputs(batch), dtype)


def _measure_ours(
    job: Job, model: nn.Module, draw: Any, batches: tuple[Arguments, Arguments], dense: float
) -> None:
    started = time.process_time()
    trace(model, batches[0])
    traced = time.process_time()
    report({"traced": True, "trace_s": traced - started})
    spec = pdp_fx.PruneSpec(SPECS[job.granularity], schedule=pdp_fx.Schedule(0, 1.0), allocation="uniform")
    prepared = pdp_fx.prepare(model, spec, batches[0])
    report({"prepare_s": time.process_time() - traced} | _structure(prepared))
    train(prepared, [draw(TRAINED_ON), draw(TRAINED_ON)])
    pdp_fx.step(prepared)
    train(prepared, [draw(TRAINED_ON)])
    prepared.eval()
    started = time.process_time()
    converted = pdp_fx.convert(prepared)
    report({"convert_s": time.process_time() - started})
    worst = difference(prepared, converted, batches)
    report({"difference": worst})
    if worst > TOLERANCE[torch.float32]:
        _decide_in_double(prepared, batches)
    else:
        report({"status": verdict(worst, model)})
    weights = [p for p in converted.parameters() if p.ndim > 1]
    zeros = sum(int((p == 0).sum()) for p in weights) / max(sum(p.numel() for p in weights), 1)
    report({"macs_removed": 1 - mmacs(converted, batches[0]) / dense, "zeros": zeros})


def _decide_in_double(prepared: fx.GraphModule, batches: tuple[Arguments, Arguments]) -> None:
    """Tell a wrong channel from rounding, which may change the order of boxes that are all but equal."""
    exact = copy.deepcopy(prepared).double()
    doubles = tuple(in_dtype(batch, torch.float64) for batch in batches)
    worst = difference(exact, pdp_fx.convert(exact), doubles)
    found: Result = {"status": verdict(worst, exact), "difference_double": worst}
    if worst > TOLERANCE[torch.float64]:
        calls = [example_call(batch) for batch in doubles]
        found["rounding"] = max(rounding_effect(exact, (one.args, dict(one.kwargs))) for one in calls)
        found["status"] = "exact" if worst <= allowed_for(found["rounding"]) else "wrong"
    report(found)


def _structure(prepared: nn.Module) -> Result:
    """What can be pruned and what can not, by the channel analysis."""
    found = find(prepared)
    if found is None or found[1].channels is None:
        return {}
    pruner, channels = found[1], found[1].channels
    counts = _weight_macs(channels)
    reached = {slot.tensor for group, _ in pruner.groups for slot in group.members}
    whys = Counter(_plain(reason.why) for group in pruner.kept for reason in group.reasons[:1])
    return {
        "macs_prunable": sum(n for name, n in counts.items() if name in reached)
        / max(sum(counts.values()), 1),
        "groups": len(pruner.groups),
        "frozen": len(pruner.kept),
        "reasons": [f"{count} x {why}" for why, count in whys.most_common(4)],
    }


def _weight_macs(channels: ChannelMap) -> dict[str, float]:
    """Multiply-accumulates of each weight."""
    counts: dict[str, float] = defaultdict(float)
    for use in channels.contractions:
        counts[use.weight] += use.positions * math.prod(channels.shapes[use.weight])
    return counts


def _plain(why: str) -> str:
    return re.sub(r"[\w.]*\d[\w.]*", "#", why)


def _guarded(work: Any) -> None:
    """Run ``work``; what stops it becomes the status."""
    try:
        work()
    except (PassError, VerifyError) as err:
        wrong = isinstance(err, VerifyError)
        report({"status": f"{'wrong' if wrong else 'failed'}: {type(err).__name__}: {str(err)[:300]}"})
    except PdpError as err:
        report({"status": f"refused: {str(err)[:600]}"})
    except Exception as err:  # noqa: BLE001 - the benchmark is about what fails, and how
        report({"status": f"failed: {type(err).__name__}: {str(err)[:300]}"})


def report(part: Result) -> None:
    """Hand a part of the results to the parent."""
    print("RESULT " + json.dumps(part), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = Job(**json.loads(sys.argv[1]))
    limit = int(wanted.gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    measure(wanted)
