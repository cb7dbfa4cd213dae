"""The overhead benchmark on a tiny net: what it measures, writes and shows."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import overhead, overhead_models
from benchmarks.gpt2 import GPT2, Config
from benchmarks.overhead_models import METHODS, WORKLOADS, Workload
from benchmarks.resnet_cifar import ResNet20


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 10),
    )


@pytest.fixture(autouse=True)
def tiny_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "resnet20", Workload(tiny, 8, (3, 6, 6), 10))


def test_the_nets_have_the_sizes_that_the_paper_trains() -> None:
    assert sum(parameter.numel() for parameter in ResNet20().parameters()) == 272_282
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in GPT2(Config()).parameters()) == 124_475_904
    small = GPT2(Config(positions=8, vocabulary=32, layers=1, heads=2, width=8))
    assert small(torch.randint(0, 32, (2, 8))).shape == (2, 8, 32)


@pytest.mark.long
def test_a_table_holds_every_method_and_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "overhead.json"
    methods = ["dense", "pdp", "optg"]
    arguments = ["--model", "resnet20", "--methods", *methods, "--clock", "cpu", "--out", str(out)]
    overhead.main([*arguments, "--rounds", "1"])
    (first,) = json.loads(out.read_text()).values()
    overhead.main([*arguments, "--rounds", "3"])
    (record,) = json.loads(out.read_text()).values()
    assert list(record["bytes"]) == methods
    for method, seconds in record["seconds"].items():
        assert len(seconds) == 3
        assert seconds[0] == first["seconds"][method][0]
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert [row for row in rows if row in METHODS] == 2 * [*methods, "dense"]


FAULTS = """
import resource, sys
import numpy as np
from benchmarks.machine import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
np.ones(5_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(5_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again_without_new_pages() -> None:
    faults = {
        mode: int(subprocess.check_output([sys.executable, "-c", FAULTS, mode], text=True))
        for mode in ("default", "keep")
    }
    assert faults["keep"] < 100 < 1000 < faults["default"]


@pytest.mark.long
def test_masks_add_no_memory_but_the_masked_weights_after_the_forward_pass(tmp_path: Path) -> None:
    methods, out = ["pdp", "pdp-nm", "pdp-channels", "optg", "cs"], tmp_path / "overhead.json"
    overhead.main(["--rounds", "1", "--methods", *methods, "--out", str(out)])
    (record,) = json.loads(out.read_text()).values()
    extra = {
        method: {spot: size - record["bytes"]["dense"][spot] for spot, size in spots.items()}
        for method, spots in record["bytes"].items()
    }
    masked = sum(parameter.numel() * 4 for parameter in tiny().parameters() if parameter.ndim > 1)
    scalars = 1024
    for method in ("pdp", "pdp-nm", "pdp-channels"):
        assert 0 <= extra[method]["created"] <= scalars
        assert extra[method]["after_forward"] <= masked + scalars
        assert extra[method]["after_backward"] <= scalars
    assert extra["optg"]["created"] >= 2 * masked
    assert extra["cs"]["after_backward"] >= 2 * masked


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_method_trains(method: str, precision: str) -> None:
    workload = WORKLOADS["resnet20"]
    torch.manual_seed(0)
    dense = workload.make().train()
    inputs, labels = workload.example(8, "cpu")
    variant = overhead_models.build(method, dense, inputs)
    optimizer = torch.optim.SGD([*dense.parameters(), *variant.own], 0.05, momentum=0.9)
    losses: list[float] = []
    for _ in range(12):
        loss = variant.loss(inputs, labels, precision)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_compiled_steps_are_measured_too(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    methods = ["dense", "pdp", "pdp-nm", "optg"]
    chosen = ["--methods", *methods, "--mode", "compile", "--precision", "bf16"]
    overhead.main([*chosen, "--rounds", "1", "--out", str(out)])
    (record,) = json.loads(out.read_text()).values()
    assert set(record["seconds"]) == set(methods)
