"""The code that a trace reads is the code that runs, also where files have changed and frames are gone."""

import importlib
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdp_fx.trace import trace
from pdp_fx.tracing.source import Frames, runs_model

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden * (0.5 * torch.ones(1, dtype={dtype}))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path, None, None]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path / "net_of_a_file.py"
    sys.modules.pop("net_of_a_file", None)


def loaded(home: Path, text: str) -> ModuleType:
    home.write_text(text)
    importlib.invalidate_caches()
    known = sys.modules.get(home.stem)
    return importlib.import_module(home.stem) if known is None else importlib.reload(known)


def dtype_after_a_cast(module: Any) -> torch.dtype:
    """The dtype that the graph of its model gives once it is cast, which must be that of the model."""
    model = module.Net()
    gm, x = trace(model, torch.randn(2, 3)), torch.randn(2, 3).bfloat16()
    wanted, got = model.bfloat16()(x), gm.bfloat16()(x)
    assert wanted.dtype is got.dtype
    return got.dtype


def test_a_module_that_is_loaded_again_is_read_again(home: Path) -> None:
    follows, fixed = CODE.format(dtype="hidden.dtype"), CODE.format(dtype="torch.float32")
    assert dtype_after_a_cast(loaded(home, follows)) is torch.bfloat16
    assert dtype_after_a_cast(loaded(home, f"\n\n{follows}")) is torch.bfloat16
    assert dtype_after_a_cast(loaded(home, fixed)) is torch.float32
    assert dtype_after_a_cast(loaded(home, f"'''It has a text.'''\n{follows}")) is torch.bfloat16


def test_a_file_that_changes_under_a_loaded_module_is_what_it_was(home: Path) -> None:
    module = loaded(home, CODE.format(dtype="hidden.dtype"))
    assert dtype_after_a_cast(module) is torch.bfloat16
    home.write_text(f"\n\n{CODE.format(dtype='torch.float32')}")
    assert dtype_after_a_cast(module) is torch.bfloat16


def test_code_without_source_is_held_to_the_dtypes_that_it_reads() -> None:
    names: dict[str, Any] = {}
    exec(CODE.format(dtype="hidden.dtype"), names)
    model = names["Net"]()
    gm, x = trace(model, torch.randn(2, 3)), torch.randn(2, 3)
    assert torch.equal(gm(x), model(x))
    with pytest.raises(AssertionError, match="a dtype in code whose source is not known"):
        gm.bfloat16()(x.bfloat16())


class Config:
    dtype = torch.float32


def scores(x: Tensor, config: Config) -> Tensor:
    dtype = x.dtype
    return (x * 2).to(dtype)


def norm(x: Tensor, config: Config) -> Tensor:
    dtype = config.dtype
    return x.to(dtype)


class OneNameForTwo(nn.Module):
    """Calls two functions one after the other, whose frames are likely to be at one place in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(3, 4), Config()

    def forward(self, x: Tensor) -> Tensor:
        return norm(self.linear(scores(x, self.config)), self.config) + 1


@pytest.mark.parametrize("training", [False, True])
def test_variables_of_one_name_in_two_functions_are_two(training: bool) -> None:
    model = OneNameForTwo().train(training)
    gm, x = trace(model, torch.randn(2, 3)), torch.randn(2, 3).bfloat16()
    assert model.bfloat16()(x).dtype is torch.float32
    with pytest.raises(AssertionError, match="a dtype that was kept"):
        gm.bfloat16()(x)


@runs_model
def numbered(frames: Frames) -> list[int]:
    def one() -> int:
        return frames.number(sys._getframe())

    def two() -> list[int]:
        return [frames.number(sys._getframe()), one(), frames.number(sys._getframe())]

    return [one(), one(), *two()]


def test_a_frame_has_one_number_as_long_as_it_runs() -> None:
    first, second, before, inner, after = numbered(Frames())
    assert before == after
    assert len({first, second, before, inner}) == 4
