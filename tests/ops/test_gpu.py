"""The Triton kernels without a GPU: in Triton's interpreter, and compiled for devices that are not here."""

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdp_fx.ops import gpu
from pdp_fx.ops.soft_mask import soft_mask
from pdp_fx.ops.threshold import threshold, threshold_by_sort

pytest.importorskip("triton")

# Triton decides when it is imported whether it compiles or interprets.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="only inside Triton's interpreter")
TAU = 1e-2


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for a block, whatever is in it."""
    monkeypatch.setattr(gpu, "BLOCKS", 3)


LAYERS = {
    "random": torch.randn(20, 30, generator=torch.Generator().manual_seed(0)),
    "large": torch.randn(3, 3000, generator=torch.Generator().manual_seed(1)),
    "ties": torch.arange(40).remainder(7).sub(3).float(),
    "tiny": torch.tensor([[0.25, -0.5]]),
    "one": torch.tensor([3.0]),
    "zeros": torch.zeros(50),
    "extremes": torch.tensor([math.inf, -0.0, 0.0, 1e-42, -1e-45, 1e38, -math.inf, 2.0, -2.0, 1.0]),
    "not a number": torch.tensor([1.0, math.nan, -3.0, 2.0, math.nan]),
    "channels last": torch.linspace(-1, 1, 4 * 6 * 9).view(4, 6, 3, 3).to(memory_format=torch.channels_last),
}


@pytest.mark.long
def test_the_kernels_pass_in_the_interpreter() -> None:
    if INTERPRETED:
        return
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here)]
    interpreting = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=interpreting, cwd=here.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@interpreted
@pytest.mark.parametrize("dtype", gpu.DTYPES)
def test_all_layers_get_the_threshold_that_each_gets_alone(dtype: torch.dtype) -> None:
    layers = [layer.to(dtype) for layer in LAYERS.values()]
    where = gpu.table(layers)
    for share in (0.0, 0.3, 0.99, 1.5):
        counts = [torch.tensor(round(share * layer.numel())) for layer in layers]
        found = gpu.thresholds(where, counts, dtype)
        pairs = zip(layers, counts, strict=True)
        expected = torch.stack([threshold_by_sort(*pair, torch.float32) for pair in pairs])
        assert torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True), share


@interpreted
def test_every_rank_of_a_layer_with_ties_is_found() -> None:
    layer = LAYERS["ties"]
    counts = [torch.tensor(count) for count in range(layer.numel() + 1)]
    found = gpu.thresholds(gpu.table([layer] * len(counts)), counts, layer.dtype)
    assert found.equal(torch.stack([threshold(layer, count) for count in counts]))


@interpreted
@pytest.mark.parametrize("dtype", gpu.DTYPES)
@pytest.mark.parametrize("tau", [TAU, torch.tensor(TAU, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ["large", "channels last"])
def test_masks_and_gradients_are_those_of_the_cpu(name: str, tau: float | Tensor, dtype: torch.dtype) -> None:
    weight = LAYERS[name].to(dtype).requires_grad_()
    upstream = torch.linspace(-2, 2, weight.numel()).view(weight.shape).to(dtype)
    for count in (0, weight.numel() // 3):
        t = threshold(weight, torch.tensor(count))
        expected = soft_mask(weight, t, tau)
        (slope,) = torch.autograd.grad(expected, weight, upstream)
        masked = gpu.masked(weight.detach(), t, tau)
        gradient = gpu.gradient(weight.detach(), t, tau, upstream)
        assert masked.stride() == expected.stride()
        # Near the threshold, w^2 - t^2 has the rounding of w^2, and is divided by tau.
        close = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps / TAU
        torch.testing.assert_close(masked, expected.detach(), rtol=close, atol=close)
        torch.testing.assert_close(gradient, slope, rtol=close, atol=10 * close)
        if count == 0:
            assert masked.equal(weight)
            assert gradient.equal(upstream)


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_weights_of_any_size_have_finite_gradients_unless_they_are_infinite() -> None:
    weight = torch.tensor([1e20, -1e30, 0.0, 1e-30, math.inf])
    t, upstream = torch.tensor(0.5), torch.ones(5)
    masked, gradient = gpu.masked(weight, t, 1e-4), gpu.gradient(weight, t, 1e-4, upstream)
    assert masked.equal(torch.tensor([1e20, -1e30, 0.0, 0.0, math.inf]))
    assert gradient[:4].equal(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert gradient[4].isnan()


@interpreted
def test_what_is_tried_on_a_device_agrees() -> None:
    assert gpu.agrees(torch.device("cpu"))


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled inside Triton's interpreter")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
def test_the_kernels_compile_for_devices_of_today(capability: int) -> None:
    triton: Any = importlib.import_module("triton")
    compiler: Any = importlib.import_module("triton.compiler")
    backends: Any = importlib.import_module("triton.backends.compiler")
    kernels: Any = importlib.import_module("pdp_fx.ops.kernels")
    numbers = {
        "BLOCK": gpu.BLOCK,
        "BLOCKS": gpu.BLOCKS,
        "DTYPE": kernels.STORED[torch.bfloat16],
        "TAU_STORED": False,
    }
    kinds = {"addresses": "*i64", "sizes": "*i64", "layers": "*i64", "starts": "*i64", "wanted": "*i64"}
    kinds |= dict.fromkeys(("prefixes", "ranks", "counts", "above"), "*i32")
    kinds |= dict.fromkeys(("threshold", "thresholds"), "*fp32")
    kinds |= dict.fromkeys(("weights", "masked", "upstream", "gradients"), "*bf16")
    kinds |= {"tau": "fp32", "size": "i32"}
    jobs = [(kernels.count_digits, shift) for shift in (24, 0)] + [(kernels.choose_digit, s) for s in (24, 0)]
    for kernel, shift in [*jobs, (kernels.mask_weights, 0), (kernels.mask_gradients, 0)]:
        constants = {n: v for n, v in (numbers | {"SHIFT": shift}).items() if n in kernel.arg_names}
        signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
        source = compiler.ASTSource(kernel, signature, constants)
        compiled = triton.compile(source, target=backends.GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]
