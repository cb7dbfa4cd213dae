"""The torchvision families, at small resolution and with BatchNorm statistics that matter."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor, fx, nn

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Unstructured
from pdp_fx.granularity import Rule
from pdp_fx.masks import ChannelMask
from pdp_fx.ops.kinds import named_modules
from tests.nets import at_once, counts, difference, mask_of, pruned, shake, state, train

Make = Callable[[], nn.Module]
SPECS = {
    "unstructured": at_once(Unstructured(0.9)),
    "n:m": at_once(NM(2, 4)),
    "channels": at_once(Channels(ratio=0.5)),
    "mixed": at_once(Channels(mac_reduction=0.3), {nn.Linear: NM(2, 4)}),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def narrow_vgg11_bn() -> nn.Module:
    """The features of VGG-11 with a classifier of a size that a test can afford."""
    model = torchvision.models.vgg11_bn(weights=None)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))
    return model


def check(make: Make, spec: PruneSpec, resolution: int) -> tuple[fx.GraphModule, fx.GraphModule, Tensor]:
    """All that is promised of one model; returns it prepared and converted, with its input."""
    torch.manual_seed(0)
    model, x = shake(make()), torch.randn(4, 3, resolution, resolution)
    dense = dict(model.named_parameters())
    prepared = pdp_fx.prepare(model, spec, x)
    assert torch.equal(model.eval()(x), prepared.eval()(x))
    assert dict(prepared.named_parameters()) == dense
    train(prepared, x, steps=1, lr=0.01)
    pdp_fx.step(prepared)
    train(prepared, x, steps=1, lr=0.01)
    check_counts(prepared.eval())
    converted = pdp_fx.convert(prepared)
    assert difference(prepared, converted, x) <= 1e-5
    assert_plain(converted)
    return prepared, converted, x


def check_counts(prepared: fx.GraphModule) -> None:
    """Every mask prunes its target by index, and all masks together the spec's share."""
    found, pruner = counts(prepared), state(prepared)
    totals: dict[Rule, tuple[int, int]] = {}
    for name, count in found.items():
        mask, rule = mask_of(prepared, name), pruner.rules[name]
        weight = prepared.get_parameter(mask.parameters_read[0])
        groups = weight.numel() // rule.of if isinstance(rule, NM) else 1
        assert count == mask.pruned_now * groups, name
        units = weight.shape[0] if isinstance(rule, Channels) else weight.numel()
        pruned_before, units_before = totals.get(rule, (0, 0))
        totals[rule] = pruned_before + count, units_before + units
    for rule, (gone, units) in totals.items():
        share = (rule.of - rule.keep) / rule.of if isinstance(rule, NM) else rule.ratio
        assert share is None or gone == round(share * units)
        if isinstance(rule, Channels) and rule.mac_reduction is not None:
            check_macs(prepared, rule.mac_reduction)


def check_macs(prepared: fx.GraphModule, reduction: float) -> None:
    """The target is met, and missed by a little with one channel less."""
    model = state(prepared).mac_model
    assert model is not None
    gone = [mask.pruned_now for _, mask in state(prepared).mask_items() if isinstance(mask, ChannelMask)]
    saved = 1 - model.macs(gone) / model.macs([0] * len(gone))
    assert reduction <= saved <= reduction + 0.01


def assert_plain(converted: fx.GraphModule) -> None:
    modules = [module for path, module in named_modules(converted) if path]
    assert all(type(module).__module__.startswith(("torch.nn.", "torchvision.")) for module in modules)


def has_norm(converted: fx.GraphModule) -> bool:
    return any(isinstance(module, nn.BatchNorm2d) for module in converted.modules())


@every_spec
def test_resnet18(spec: PruneSpec) -> None:
    _, converted, x = check(lambda: torchvision.models.resnet18(weights=None), spec, 32)
    assert not has_norm(converted)
    blob = pickle.dumps(converted)
    assert b"pdp_fx" not in blob
    torch.testing.assert_close(pickle.loads(blob)(x), converted(x), rtol=0, atol=0)


@pytest.mark.long
@every_spec
def test_mobilenet_v2(spec: PruneSpec) -> None:
    _, converted, _ = check(lambda: torchvision.models.mobilenet_v2(weights=None), spec, 32)
    assert not has_norm(converted)


@pytest.mark.long
@every_spec
def test_vgg11_bn_with_a_small_classifier(spec: PruneSpec) -> None:
    _, converted, _ = check(narrow_vgg11_bn, spec, 32)
    assert not has_norm(converted)


@pytest.mark.long
def test_channels_of_densenet121() -> None:
    """Its norms stand before their convs, behind a concatenation; only those behind a conv can be folded."""
    _, converted, _ = check(lambda: torchvision.models.densenet121(weights=None), SPECS["channels"], 32)
    left = [path for path, module in named_modules(converted) if isinstance(module, nn.BatchNorm2d)]
    assert left
    assert all(path.endswith(("norm1", "norm", "norm5")) for path in left)


def test_channels_of_resnet50() -> None:
    _, converted, _ = check(lambda: torchvision.models.resnet50(weights=None), SPECS["channels"], 32)
    assert not has_norm(converted)


HEAVY: dict[str, tuple[Make, int]] = {
    "resnet50": (lambda: torchvision.models.resnet50(weights=None), 64),
    "densenet121": (lambda: torchvision.models.densenet121(weights=None), 64),
    "vgg11_bn": (lambda: torchvision.models.vgg11_bn(weights=None), 32),
}


@pytest.mark.slow
@every_spec
@pytest.mark.parametrize(("make", "resolution"), HEAVY.values(), ids=HEAVY)
def test_the_large_models(make: Make, resolution: int, spec: PruneSpec) -> None:
    check(make, spec, resolution)


@pytest.mark.long
@every_spec
def test_resnet18_in_float64_to_nine_digits(spec: PruneSpec) -> None:
    torch.manual_seed(0)
    model = shake(torchvision.models.resnet18(weights=None, num_classes=16)).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    prepared = pruned(model, spec, x).eval()
    assert difference(prepared, pdp_fx.convert(prepared), x) <= 1e-9


@pytest.mark.slow
@every_spec
def test_resnet18_goes_through_export_and_onnx(spec: PruneSpec, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    _, converted, x = check(lambda: torchvision.models.resnet18(weights=None), spec, 32)
    expected = converted(x)
    exported = torch.export.export(converted, (x,)).module()
    torch.testing.assert_close(exported(x), expected, rtol=1e-5, atol=1e-5)
    path = tmp_path / "model.onnx"
    torch.onnx.export(converted, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert (torch.from_numpy(found) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_resnet18_has_the_papers_dense_count() -> None:
    """1814.1 million multiply-accumulates at 224 x 224 (paper, table 1)."""
    x = torch.randn(1, 3, 224, 224)
    prepared = pdp_fx.prepare(torchvision.models.resnet18(weights=None), at_once(Channels(ratio=0.5)), x)
    model = state(prepared).mac_model
    assert model is not None
    assert round(model.macs([0] * len(model.widths)) / 1e6, 1) == 1814.1
