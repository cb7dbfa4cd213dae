"""A call that fails inside a block of a model leaves gradients and autocast as they were."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pdp_fx import Channels, PruneSpec, Schedule, Unstructured, convert, prepare, step
from pdp_fx.trace import trace
from tests.tracing.checks import exact, opaque


class Still(nn.Module):
    """Fails without gradients for inputs of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.still, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.still(x)
        return self.last(shift)


class Cast(Still):
    """Fails with autocast, or without it in a caller that has it on."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            x = self.still(x)
        return self.last(x.float())


class Nested(Still):
    """Fails in a block that is inside another of each kind."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = x * 2
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                y = self.still(y)
        return self.last(y.float())


class Recomputed(Still):
    """Fails in a part that is recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        result: Any = checkpoint(super().forward, x, use_reentrant=False)
        return result


class Skipped(Still):
    """Fails in a part that training skips at random."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.rand(()) < 0.5):
            with torch.no_grad():
                x = x + self.still(x)
        return self.last(x)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("model", [Still(), Cast(True), Cast(False), Nested(), Recomputed(), Skipped()])
def test_a_failed_call_leaves_settings_as_they_were(model: nn.Module, enabled: bool) -> None:
    gm = exact(model, torch.randn(3, 4), torch.randn(5, 4))
    assert not opaque(gm)
    for one in (gm, pickle.loads(pickle.dumps(gm))):
        one.eval()
        with torch.set_grad_enabled(enabled), torch.autocast("cpu", enabled=enabled):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                one(torch.randn(3, 5))
            assert torch.is_grad_enabled() is enabled
            assert torch.is_autocast_enabled("cpu") is enabled
        assert open_blocks() == 0


def open_blocks() -> int:
    """How many blocks of autocast are open; torch forgets the weights that it has cast when none is."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@pytest.mark.parametrize(
    ("model", "block"),
    [
        (Still(), "except BaseException:"),
        (Cast(True), "with torch.autocast("),
        (Nested(), "with torch.autocast("),
    ],
)
def test_blocks_compile_without_graph_breaks(model: nn.Module, block: str) -> None:
    x = torch.randn(3, 4)
    gm = trace(model, x)
    assert block in gm.code
    compiled = torch.compile(gm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), gm(x))


ASKED = """
import pickle, sys, torch
model = pickle.load(open(sys.argv[1], "rb"))
for one in (model, pickle.loads(pickle.dumps(model))):
    try:
        one(torch.randn(3, 5))
        raise SystemExit("no error")
    except RuntimeError:
        print(torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), "pdp_fx" in sys.modules)
"""


@pytest.mark.parametrize("model", [Still(), Cast(True), Nested()], ids=["grad", "autocast", "nested"])
def test_a_failed_call_of_a_converted_model_leaves_settings_as_they_were(
    model: nn.Module, tmp_path: Path
) -> None:
    x = torch.randn(3, 4)
    prepared = prepare(model, PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0)), x)
    step(prepared)
    converted = convert(prepared)
    for one in (converted, copy.deepcopy(converted), copy.copy(converted)):
        one.recompile()
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            one(torch.randn(3, 5))
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert open_blocks() == 0
        assert one(x).equal(converted(x))
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), converted(x))
    exported = torch.export.export(nn.Sequential(converted), (x,)).module()
    torch.testing.assert_close(exported(x), converted(x))
    (tmp_path / "model").write_bytes(pickle.dumps(converted))
    command = [sys.executable, "-I", "-c", ASKED, str(tmp_path / "model")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.split() == ["True", "False", "False"] * 2


class OfOneSize(nn.Module):
    """Takes images of one size only, which shows in a block of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.last = nn.Conv2d(3, 8, 1), nn.Linear(8 * 36, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.hidden(x.flatten(1))
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                shift = x.float().view(x.shape[0], 2, 8).sum(1)
        return self.last(torch.cat([shift, x[:, :8].float()], 1))


@pytest.mark.parametrize("rule", [Channels(0.5), Unstructured(0.5)])
def test_trials_on_other_sizes_leave_settings_as_they_were(rule: Channels | Unstructured) -> None:
    x = torch.randn(2, 3, 6, 6)
    prepared = prepare(OfOneSize(), PruneSpec(rule, schedule=Schedule(0, 1.0, length=2)), x)
    prepared(x).sum().backward()
    step(prepared)
    masked = prepared.eval()(x)
    torch.testing.assert_close(convert(prepared)(x), masked, rtol=0.02, atol=0.02)
    assert open_blocks() == 0
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
