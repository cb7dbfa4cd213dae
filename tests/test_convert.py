import copy
import logging
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule, StateError, Unstructured, VerifyError, proving
from pdp_fx.compiler import Context, Pass
from pdp_fx.granularity import Rule, rule_text
from pdp_fx.ops.kinds import named_modules
from pdp_fx.passes.fold_batch_norm import FoldBatchNorm
from pdp_fx.spec import Allocation
from tests.nets import (
    NETS,
    RULES,
    ConvNet,
    Mlp,
    Residual,
    assert_unchanged,
    at_once,
    counts,
    difference,
    mask_of,
    net,
    pruned,
    shake,
    snapshot,
    state,
    train,
)

MIXED = at_once(Channels(ratio=0.5), {nn.Linear: NM(2, 4)})
SPECS: dict[str, PruneSpec] = {name: at_once(rule) for name, rule in RULES.items()}
SPECS["uniform"] = at_once(Unstructured(0.7), allocation="uniform")
SPECS["macs"] = at_once(Channels(mac_reduction=0.3))

every_net = pytest.mark.parametrize("name", NETS)
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@every_net
@every_spec
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_converted_equals_prepared_in_eval(
    name: str, spec: PruneSpec, dtype: torch.dtype, tolerance: float
) -> None:
    model, x = net(name)
    prepared = pruned(model.to(dtype), spec, x.to(dtype)).eval()
    converted = pdp_fx.convert(prepared)
    for inputs in (x, torch.randn(7, *x.shape[1:])):
        assert difference(prepared, converted, inputs.to(dtype)) <= tolerance


@pytest.mark.parametrize(
    ("name", "smaller"),
    [("conv", ["conv1.weight"]), ("residual", ["expand.0.weight", "depthwise.0.weight"])],
)
def test_channels_in_the_trunk_and_two_of_four_in_the_classifier(name: str, smaller: list[str]) -> None:
    model, x = net(name)
    prepared = pruned(model.double(), MIXED, x.double()).eval()
    converted = pdp_fx.convert(prepared)
    assert difference(prepared, converted, x.double()) <= 1e-9
    weight = converted.get_parameter("fc.weight")
    assert (weight.unflatten(1, (-1, 4)) == 0).sum(2).eq(2).all()
    rows = {key: p.shape[0] for key, p in converted.named_parameters() if key.endswith("weight")}
    assert [key for key, count in rows.items() if count < model.get_parameter(key).shape[0]] == smaller
    assert weight.shape == model.get_parameter("fc.weight").shape


@pytest.mark.parametrize("parts", [lambda x: x.unbind(1), lambda x: x.split(1, dim=1)])
def test_a_converted_loop_over_parts_takes_as_many_steps_only(
    parts: Callable[[Tensor], list[Tensor]],
) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(sum((part.relu() for part in parts(self.first(x))), torch.zeros(())))

    prepared = pruned(Steps(), SPECS["channels"], torch.randn(2, 5, 4))
    converted = pdp_fx.convert(prepared.eval())
    assert converted.get_parameter("first.weight").shape == (4, 4)
    with pytest.raises(AssertionError, match="goes up to 5"):
        converted(torch.randn(2, 7, 4))


class WindowHeads(nn.Module):
    """Heads attend within windows of 2x2 places; batch, windows and heads share an axis, as with einops."""

    heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(3, 3 * 8 * self.heads, 1), nn.Conv2d(8 * self.heads, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high, wide = x.shape[2] // 2, x.shape[3] // 2
        parts = self.qkv(x).unflatten(3, (wide, 2)).unflatten(2, (high, 2)).permute(0, 2, 4, 1, 3, 5)
        parts = parts.reshape(-1, *parts.shape[3:]).flatten(2).chunk(3, 1)
        q, k, v = (part.reshape(part.shape[0] * self.heads, -1, 4).mT for part in parts)
        attended = torch.softmax(q @ k.mT / 8**0.5, -1) @ v
        if attended.shape[0] % (high * wide * self.heads):
            raise ValueError("these are not all heads of all windows")
        batch = attended.shape[0] // (high * wide * self.heads)
        attended = attended.reshape(batch, high, wide, self.heads, 2, 2, -1).permute(0, 3, 6, 1, 4, 2, 5)
        return self.out(attended.reshape(batch, -1, 2 * high, 2 * wide))


def test_heads_that_share_an_axis_with_batch_and_windows_are_counted_at_all_sizes() -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    prepared = pruned(WindowHeads().double(), SPECS["channels"], x).eval()
    converted = pdp_fx.convert(prepared)
    assert converted.get_parameter("out.weight").shape[1] < 32
    for shape in ((2, 3, 8, 8), (3, 3, 8, 8), (2, 3, 12, 8), (1, 3, 4, 10)):
        assert difference(prepared, converted, torch.randn(shape, dtype=torch.float64)) <= 1e-9


def test_a_converted_model_decides_by_sizes_and_as_many_channels_as_there_were() -> None:
    class Longer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.second(x * 2 if x.shape[1] < x.shape[2] else x)

    prepared = pruned(Longer().double(), SPECS["channels"], torch.randn(2, 5, 4, dtype=torch.float64))
    converted = pdp_fx.convert(prepared.eval())
    assert converted.get_parameter("first.weight").shape == (4, 4)
    assert difference(prepared, converted, torch.randn(2, 7, 4, dtype=torch.float64)) <= 1e-9
    with pytest.raises(AssertionError, match="decides by sizes"):
        converted(torch.randn(2, 8, 4, dtype=torch.float64))


@every_net
@every_spec
def test_neither_the_users_nor_the_prepared_model_is_changed(name: str, spec: PruneSpec) -> None:
    model, x = net(name)
    prepared = pruned(model, spec, x)
    before = snapshot(model), snapshot(prepared)
    graph, generator = str(prepared.graph), torch.get_rng_state()
    converted = pdp_fx.convert(prepared)
    assert torch.equal(torch.get_rng_state(), generator)
    train(converted, x)
    assert_unchanged(model, before[0])
    assert_unchanged(prepared, before[1])
    assert str(prepared.graph) == graph


@every_net
@every_spec
def test_the_converted_model_is_plain(name: str, spec: PruneSpec) -> None:
    model, x = net(name)
    converted = pdp_fx.convert(pruned(model, spec, x))
    for path, module in named_modules(converted):
        assert path == "" or type(module).__module__.startswith("torch.nn.modules."), path
        assert not module.training
    assert b"pdp_fx" not in pickle.dumps(converted)
    assert not any("pdp" in key for key in converted.state_dict())
    assert "pdp" not in converted.code
    for copied in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        torch.testing.assert_close(copied(x), converted(x), rtol=0, atol=0)


@pytest.mark.long
@every_net
@every_spec
def test_the_converted_model_exports_and_compiles(name: str, spec: PruneSpec, tmp_path: Path) -> None:
    model, x = net(name)
    converted = pdp_fx.convert(pruned(model, spec, x))
    expected = converted(x)
    torch.export.save(torch.export.export(converted, (x,)), tmp_path / "model.pt2")
    exported = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(exported(x), expected, rtol=1e-6, atol=1e-6)
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("affine", [False, True])
def test_norms_without_tensors_know_how_many_channels_are_left(affine: bool) -> None:
    norm = nn.InstanceNorm2d(8, affine=affine)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 1))
    x = torch.randn(2, 3, 6, 6)
    converted = pdp_fx.convert(pruned(model, SPECS["channels"], x))
    left = converted.get_submodule("0").get_parameter("weight").shape[0]
    assert left < 8
    assert vars(converted.get_submodule("1"))["num_features"] == left
    assert norm.num_features == 8
    converted(x)
    torch.compile(converted, backend="eager", fullgraph=True)(x)


class Masked(nn.Module):
    """Takes a mask, and between it and the data something that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, shift: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x if shift is None else x + shift
        x = torch.relu(self.inner(x))
        return self.out(x if mask is None else x * mask[:, None])


def test_inputs_given_by_name_are_exported_strictly() -> None:
    given = {"x": torch.randn(4, 6), "mask": torch.ones(4)}
    prepared = pdp_fx.prepare(Masked(), SPECS["channels"], given)
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared)
    exported = torch.export.export(converted, (), given, strict=True).module()
    torch.testing.assert_close(exported(**given), converted(**given))
    with pytest.raises(AssertionError, match="this graph was traced with shift=None"):
        torch.export.export(converted, (), given, strict=False)


@pytest.mark.parametrize(
    ("name", "spec"), [("residual", SPECS["channels"]), ("conv", MIXED)], ids=["channels", "mixed"]
)
def test_onnx_runtime_gives_the_same(name: str, spec: PruneSpec, tmp_path: Path) -> None:
    check_onnx(*net(name), spec, tmp_path)


@pytest.mark.slow
@every_net
@every_spec
def test_onnx_runtime_gives_the_same_for_every_net(name: str, spec: PruneSpec, tmp_path: Path) -> None:
    check_onnx(*net(name), spec, tmp_path)


def check_onnx(model: nn.Module, x: Tensor, spec: PruneSpec, folder: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    converted = pdp_fx.convert(pruned(model, spec, x))
    path = folder / "model.onnx"
    torch.onnx.export(converted, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = converted(x)
    assert (torch.from_numpy(found) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_layers_may_have_the_names_of_methods() -> None:
    layers = {"keys": nn.Linear(4, 8), "relu": nn.ReLU(), "values": nn.Linear(8, 8), "out": nn.Linear(8, 2)}
    prepared = pruned(nn.Sequential(OrderedDict(layers)), Channels(ratio=0.5), torch.randn(2, 4))
    small = pdp_fx.convert(prepared)
    assert small.get_parameter("keys.bias").numel() + small.get_parameter("values.bias").numel() == 8


def test_smaller_shapes_show_when_printed() -> None:
    model, x = net("residual")
    prepared = pruned(model, at_once(Channels(ratio=0.5), allocation="uniform"), x)
    assert str(pdp_fx.convert(prepared)).split("\n\n")[0] == PRINTED


PRINTED = """\
Residual(
  (stem): Module(
    (0): Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    (2): ReLU(inplace=True)
  )
  (expand): Module(
    (0): Conv2d(4, 8, kernel_size=(1, 1), stride=(1, 1))
    (2): ReLU6()
  )
  (depthwise): Module(
    (0): Conv2d(8, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=8)
    (2): SiLU()
  )
  (project): Module(
    (0): Conv2d(8, 4, kernel_size=(1, 1), stride=(1, 1))
  )
  (dropout): Dropout(p=0.2, inplace=False)
  (fc): Linear(in_features=4, out_features=5, bias=True)
)"""


@every_net
def test_zeros_are_the_specs_number_in_total(name: str) -> None:
    model, x = net(name)
    prepared = pruned(model, Unstructured(0.7), x)
    converted = pdp_fx.convert(prepared)
    weights = [parameter for parameter in converted.parameters() if parameter.ndim > 1]
    total = sum(weight.numel() for weight in weights)
    assert sum(int((weight == 0).sum()) for weight in weights) == round(0.7 * total)
    assert sum(counts(prepared).values()) == round(0.7 * total)


def test_zeros_are_the_specs_number_per_layer_with_overrides() -> None:
    model, x = net("residual")
    overrides: dict[str, Rule | None] = {
        "stem": Unstructured(0.25),
        "expand.0": None,
        "re:.*wise.0": Unstructured(0.5),
        "fc": NM(2, 8),
    }
    prepared = pruned(model, at_once(Unstructured(0.8), overrides), x)
    converted = pdp_fx.convert(prepared)
    zeros = {key: int((p == 0).sum()) for key, p in converted.named_parameters() if key.endswith("weight")}
    assert zeros == {
        "stem.0.weight": 54,
        "expand.0.weight": 0,
        "depthwise.0.weight": 72,
        "project.0.weight": 102,
        "fc.weight": 30,
    }


def test_uniform_allocation_prunes_every_layer_alike() -> None:
    model, x = net("residual")
    prepared = pruned(model, at_once(Unstructured(0.7), allocation="uniform"), x)
    for name, count in counts(prepared).items():
        assert count == round(0.7 * prepared.get_parameter(read(prepared, name)).numel()), name


def groups(prepared: nn.Module, name: str) -> int:
    """How many groups of M an N:M mask has; any other mask has one."""
    rule = state(prepared).rules[name]
    return prepared.get_parameter(read(prepared, name)).numel() // rule.of if isinstance(rule, NM) else 1


def read(prepared: nn.Module, name: str) -> str:
    return mask_of(prepared, name).parameters_read[0]


@pytest.mark.parametrize("min_keep", [0.0, 0.25, 1.0])
def test_the_guard_holds_and_the_total_stays_exact(min_keep: float) -> None:
    model, x = net("mlp")
    model.get_parameter("fc2.weight").data.mul_(1e-3)
    prepared = pdp_fx.prepare(model, at_once(Unstructured(0.75), min_keep=min_keep), x)
    pdp_fx.step(prepared)
    found = counts(prepared)
    assert sum(found.values()) == 276
    assert found["fc2_weight"] == {0.0: 191, 0.25: 180, 1.0: 144}[min_keep]


@every_spec
def test_ties_are_counted_out(spec: PruneSpec) -> None:
    model, x = net("residual")
    for parameter in model.parameters():
        parameter.data.fill_(0.1)
    prepared = pdp_fx.prepare(model, spec, x)
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared)
    for name, count in counts(prepared).items():
        assert count == mask_of(prepared, name).pruned_now * groups(prepared, name), name
    assert difference(prepared.eval(), converted, x) <= 1e-5


@every_rule
def test_a_tied_weight_is_one_site(rule: Rule) -> None:
    model, x = net("tied")
    prepared = pruned(model, rule, x)
    converted = pdp_fx.convert(prepared)
    assert converted.get_submodule("encoder").weight is converted.get_submodule("decoder").weight
    sites = [name for name, _ in state(prepared).mask_items()]
    expected = ["stem"] if isinstance(rule, Channels) else ["stem_weight", "encoder_weight", "head_weight"]
    assert sites == expected


def test_a_tied_weight_with_two_rules_is_skipped() -> None:
    model, x = net("tied")
    prepared = pdp_fx.prepare(model, at_once(Unstructured(0.5), {"decoder": None}), x)
    assert [name for name, _ in state(prepared).mask_items()] == ["stem_weight", "head_weight"]
    assert state(prepared).skipped == (
        (
            "encoder",
            "its weight is shared by layers to which the spec gives different rules "
            "(encoder: Unstructured(ratio=0.5), decoder: skip)",
        ),
    )


@every_net
@every_spec
def test_counts_are_exact_in_bfloat16(name: str, spec: PruneSpec) -> None:
    model, x = net(name)
    prepared = pruned(model.bfloat16(), spec, x.bfloat16())
    for mask, count in counts(prepared).items():
        assert count == mask_of(prepared, mask).pruned_now * groups(prepared, mask)
    assert pdp_fx.convert(prepared)(x.bfloat16()).dtype == torch.bfloat16


def test_kept_channels_are_the_specs_number_in_total() -> None:
    model, x = net("residual")
    converted = pdp_fx.convert(pruned(model, Channels(ratio=0.4), x))
    rows = {name: kept_rows(converted, f"{name}.0") for name in ("stem", "expand", "depthwise")}
    assert 8 - rows["stem"] + 16 - rows["expand"] == round(0.4 * 24)
    assert rows["depthwise"] == rows["expand"]
    assert converted.get_parameter("fc.weight").shape == (5, rows["stem"])


def kept_rows(converted: nn.Module, layer: str) -> int:
    return converted.get_parameter(f"{layer}.weight").shape[0]


@pytest.mark.parametrize(("round_to", "min_channels"), [(4, 1), (8, 1), (1, 12), (16, 1)])
def test_channel_counts_respect_round_to_and_min_channels(round_to: int, min_channels: int) -> None:
    torch.manual_seed(0)
    model, x = shake(ConvNet(width=48)), torch.randn(4, 3, 8, 8)
    rule = Channels(ratio=0.6, round_to=round_to, min_channels=min_channels)
    converted = pdp_fx.convert(pruned(model, rule, x))
    kept = [kept_rows(converted, name) for name in ("conv1", "conv2")]
    assert kept[0] == 8 if round_to == 16 or min_channels == 12 else kept[0] % round_to == 0
    assert kept[1] % round_to == 0
    assert kept[1] >= min_channels


class Heads(nn.Module):
    """Four heads of eight channels, laid out by view."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 96), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("round_to", "left"), [(8, 8), (16, 16), (12, 24), (64, 32)])
def test_a_head_counts_as_its_channels_where_these_are_rounded(round_to: int, left: int) -> None:
    rule = Channels(ratio=0.75, round_to=round_to)
    spec = PruneSpec(rule, {"out": Unstructured(0.5)}, schedule=Schedule(0, 1.0))
    model = pdp_fx.prepare(Heads(), spec, torch.randn(2, 5, 6))
    pdp_fx.step(model)
    assert pdp_fx.convert(model).get_parameter("out.weight").shape == (6, left)


@pytest.mark.parametrize(("min_channels", "left"), [(1, 8), (8, 8), (9, 16), (24, 24)])
def test_a_head_counts_as_its_channels_where_a_layer_keeps_some(min_channels: int, left: int) -> None:
    rule = Channels(ratio=0.75, min_channels=min_channels)
    spec = PruneSpec(rule, {"out": Unstructured(0.5)}, schedule=Schedule(0, 1.0))
    model = pdp_fx.prepare(Heads(), spec, torch.randn(2, 5, 6))
    pdp_fx.step(model)
    assert pdp_fx.convert(model).get_parameter("out.weight").shape == (6, left)
    assert [group.least * 8 for group in pdp_fx.explain(model).groups] == [left]


@pytest.mark.parametrize("reduction", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_the_mac_target_is_met_and_barely(reduction: float, allocation: Allocation) -> None:
    torch.manual_seed(0)
    model, x = shake(Residual(32, 64)), torch.randn(2, 3, 8, 8)
    prepared = pruned(model, at_once(Channels(mac_reduction=reduction), allocation=allocation), x)
    dense, small = macs(model), macs(pdp_fx.convert(prepared))
    assert 1 - reduction - 0.05 <= small / dense <= 1 - reduction


class Split(nn.Module):
    """A layer of whose channels the last four are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Conv2d(3, 8, 1)
        self.left = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.both(x).relu().chunk(2, 1)
        return self.left(left) * right


@pytest.mark.parametrize("row", range(4))
def test_a_channel_that_goes_takes_none_along_that_stays(row: int) -> None:
    torch.manual_seed(0)
    model, x = Split(), torch.randn(2, 3, 4, 4)
    with torch.no_grad():
        model.both.weight[row].mul_(1e-3)
    small = pdp_fx.convert(pruned(model, at_once(Channels(0.25)), x))
    assert small.get_parameter("both.weight").shape[0] == 7
    assert torch.equal(small.get_parameter("both.weight"), model.both.weight[torch.arange(8) != row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_difference_in_the_eighth_digit_is_found_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = shake(Residual()).to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    prepared = pruned(model, at_once(Channels(0.5)), x)

    def tamper(before: str, step: Pass, gm: fx.GraphModule) -> None:
        if step.name == "fold-batch-norm":
            with torch.no_grad():
                gm.get_parameter("fc.weight").mul_(1 + 1e-7)

    if dtype == torch.float32:
        pdp_fx.convert(prepared, on_pass=tamper)
    else:
        with pytest.raises(VerifyError, match="differs from the prepared one by 1"):
            pdp_fx.convert(prepared, on_pass=tamper)


def test_the_difference_allowed_follows_the_rounding_up_to_a_limit() -> None:
    assert proving.allowed_for(1e-12) == 1e-9
    assert proving.allowed_for(1e-9) == pytest.approx(1e-8)
    assert proving.allowed_for(1e-6) == 1e-9


@pytest.mark.parametrize("before", [True, False])
def test_a_hook_of_either_side_that_changes_the_outputs_is_refused(before: bool) -> None:
    def doubled(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (2 * args[0],)

    def halved(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return output / 2

    model, x = net("small")
    prepared = pruned(model, Unstructured(0.5), x)
    if before:
        prepared.register_forward_pre_hook(doubled)
    else:
        prepared.register_forward_hook(halved)
    with pytest.raises(StateError, match="holds or does more than a prepared model"):
        pdp_fx.convert(prepared)


def test_the_mac_target_counts_what_the_ratio_of_a_layer_saves() -> None:
    torch.manual_seed(0)
    model, x = shake(Residual(32, 64)), torch.randn(2, 3, 8, 8)
    rule = Channels(mac_reduction=0.5)
    prepared = pruned(model, at_once(rule, {"expand.0": Channels(ratio=0.5)}), x)
    dense, small = macs(model), macs(pdp_fx.convert(prepared))
    assert 0.45 <= small / dense <= 0.5


def macs(model: nn.Module) -> float:
    """Multiply-accumulates of a `Residual` for 8 x 8 images, counted layer by layer."""
    convs = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Conv2d)]
    return 64 * sum(convs) + model.get_parameter("fc.weight").numel()


class Twice(nn.Module):
    """A conv whose output is read twice; a module called twice; a BatchNorm ahead of its conv."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.other = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.BatchNorm2d(4)
        if kind == "shared weight":
            self.other.weight = self.conv.weight
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "conv read twice":
            y = self.conv(x)
            return self.head(self.bn(y) + y)
        if self.kind == "conv called twice":
            return self.head(self.bn(self.conv(torch.relu(self.conv(x)))))
        if self.kind == "norm called twice":
            return self.head(self.bn(self.other(torch.relu(self.bn(self.conv(x))))))
        if self.kind == "shared weight":
            return self.head(self.last(self.other(torch.relu(self.bn(self.conv(x))))))
        return self.head(self.conv(torch.relu(self.bn(x))))


@every_rule
@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("conv read twice", ["bn"]),
        ("conv called twice", ["bn"]),
        ("norm called twice", ["bn"]),
        ("shared weight", ["bn", "last"]),
        ("norm first", ["bn"]),
    ],
)
def test_batch_norm_stays_where_folding_would_be_wrong(rule: Rule, kind: str, left: list[str]) -> None:
    model, x = shake(Twice(kind)).double(), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    prepared = pdp_fx.prepare(model, at_once(rule, {"head": Unstructured(0.5)}), x)
    pdp_fx.step(prepared)
    train(prepared, x)
    converted = pdp_fx.convert(prepared)
    assert difference(prepared.eval(), converted, x) <= 1e-9
    assert [name for name, module in named_modules(converted) if isinstance(module, nn.BatchNorm2d)] == left


@every_net
@every_spec
def test_no_batch_norm_is_left_where_folding_is_legal(name: str, spec: PruneSpec) -> None:
    model, x = net(name)
    converted = pdp_fx.convert(pruned(model, spec, x))
    assert not [m for m in converted.modules() if isinstance(m, nn.BatchNorm2d)]


def test_a_schedule_never_advanced_is_said() -> None:
    model, x = net("conv")
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.5)), x)
    with pytest.raises(StateError, match=r"the schedule was never advanced; call pdp_fx.step\(model\)"):
        pdp_fx.convert(prepared)
    pdp_fx.step(prepared)
    with pytest.raises(StateError, match="step was called 1 times, and the ramp runs from 16 to 83"):
        pdp_fx.convert(prepared)


def test_a_ramp_of_groups_that_has_pruned_no_whole_weight_is_no_pruning() -> None:
    model, x = net("conv")
    prepared = pdp_fx.prepare(model, PruneSpec(NM(2, 4), schedule=Schedule(0, 0.25)), x)
    pdp_fx.step(prepared)
    with pytest.raises(StateError, match="nothing is pruned yet"):
        pdp_fx.convert(prepared)
    pdp_fx.step(prepared)
    assert pdp_fx.convert(prepared)


def test_a_ramp_that_has_not_finished_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model, x = net("conv")
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.5), schedule=Schedule(0, 0.25)), x)
    pdp_fx.step(prepared)
    with caplog.at_level(logging.WARNING):
        converted = pdp_fx.convert(prepared)
    assert "convert at 25 % of the target" in caplog.text
    assert difference(prepared.eval(), converted, x) <= 1e-5


class Queue(nn.Module):
    """Writes what it makes into a queue, and begins anew when that is full."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.register_buffer("queue", torch.zeros(16, 8))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y, place = self.linear(x), int(self.place)
        self.queue[place : place + len(y)] = y.detach()
        self.place.copy_((self.place + len(y)) % 16)
        return y @ self.queue.t()


def test_a_model_whose_buffers_no_longer_fit_its_example_is_refused() -> None:
    prepared = pruned(Queue(), Unstructured(0.5), torch.randn(4, 6))
    prepared.get_buffer("place").fill_(14)
    assert prepared(torch.randn(2, 6)).shape == (2, 16)
    prepared.get_buffer("place").fill_(14)
    with pytest.raises(StateError, match="fails on the example that it was made with.* put its buffers back"):
        pdp_fx.convert(prepared)
    prepared.get_buffer("place").fill_(0)
    assert pdp_fx.convert(prepared)


def test_weights_that_became_nan_are_refused() -> None:
    model, x = net("conv")
    prepared = pruned(model, Unstructured(0.5), x)
    prepared.get_parameter("conv2.weight").data[0] = float("nan")
    with pytest.raises(StateError, match="conv2.weight holds NaN .*: the training has diverged"):
        pdp_fx.convert(prepared)


def test_a_module_that_holds_more_than_the_prepared_model_is_refused() -> None:
    model, x = net("mlp")
    prepared = pruned(model, Unstructured(0.5), x)
    for more in (nn.Sequential(prepared, nn.ReLU()), nn.ModuleDict({"backbone": prepared, "head": Mlp()})):
        with pytest.raises(StateError, match="call convert on the part that came from prepare"):
            pdp_fx.convert(more)


class Calibrated(nn.Module):
    """Computes more than the model in it, by a parameter of its own or without one."""

    def __init__(self, inner: nn.Module, trained: bool) -> None:
        super().__init__()
        self.inner = inner
        if trained:
            self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / 2


class Passes(nn.Module):
    """Computes what the model in it computes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_wrapper_that_computes_more_is_refused() -> None:
    model, x = net("mlp")
    prepared = pruned(model, Unstructured(0.5), x)
    for trained in (False, True):
        with pytest.raises(StateError, match="Calibrated holds or does more than a prepared model"):
            pdp_fx.convert(Calibrated(prepared, trained))
    converted = pdp_fx.convert(Passes(nn.Sequential(prepared)))
    assert torch.equal(converted(x), pdp_fx.convert(prepared)(x))


def doubled(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return 2 * output


def test_a_hook_that_changes_what_a_prepared_model_gives_is_refused() -> None:
    model, x = net("mlp")
    prepared = pruned(model, Unstructured(0.5), x)
    seen: list[int] = []
    looks = prepared.register_forward_hook(lambda module, inputs, output: seen.append(1))
    pdp_fx.convert(prepared)
    assert seen
    looks.remove()
    prepared.register_forward_hook(doubled)
    with pytest.raises(StateError, match="as by a hook"):
        pdp_fx.convert(prepared)


def test_a_hook_on_a_wrapper_that_changes_what_it_gives_is_refused() -> None:
    model, x = net("mlp")
    whole = nn.Sequential(pruned(model, Unstructured(0.5), x))
    whole.register_forward_hook(doubled)
    with pytest.raises(StateError, match="Sequential holds or does more than a prepared model"):
        pdp_fx.convert(whole)


@pytest.mark.parametrize("wrapped", [False, True])
def test_another_forward_set_on_a_model_is_refused_if_it_computes_more(wrapped: bool) -> None:
    model, x = net("mlp")
    prepared = pruned(model, Unstructured(0.5), x)
    whole: nn.Module = nn.Sequential(prepared) if wrapped else prepared
    forward = whole.forward

    def twice(x: Tensor) -> Tensor:
        return 2 * forward(x)

    vars(whole)["forward"] = twice
    with pytest.raises(StateError, match="as by a hook or another forward"):
        pdp_fx.convert(whole)
    vars(whole)["forward"] = torch.autocast("cpu", torch.bfloat16)(forward)
    converted = pdp_fx.convert(whole)
    del vars(whole)["forward"]
    assert difference(whole.eval(), converted, x) <= 1e-5


def test_autocast_of_other_threads_stays_while_a_model_is_compared() -> None:
    model, x = net("mlp")
    prepared = pruned(model, Unstructured(0.5), x)
    forward, seen = prepared.forward, list[torch.dtype]()

    def elsewhere() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            seen.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)

    def beside(x: Tensor) -> Tensor:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        return forward(x)

    vars(prepared)["forward"] = beside
    pdp_fx.convert(prepared)
    assert seen == [torch.bfloat16] * len(seen) != []


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_running_statistics_that_became_nan_are_refused(broken: float) -> None:
    model, x = net("conv")
    prepared = pruned(model, Unstructured(0.5), x)
    name = next(name for name, _ in prepared.named_buffers() if name.endswith("running_var"))
    prepared.get_buffer(name)[0] = broken
    with pytest.raises(StateError, match=f"{name} holds NaN .*: the training has diverged"):
        pdp_fx.convert(prepared)


@every_rule
def test_a_schedule_that_was_averaged_or_cast_is_refused(rule: Rule) -> None:
    model, x = net("conv")
    prepared = pruned(model, rule, x)
    average = copy.deepcopy(prepared)
    for _ in range(3):
        for mine, theirs in zip(average.state_dict().values(), prepared.state_dict().values(), strict=True):
            mine.copy_(0.9 * mine + 0.1 * theirs)
    with pytest.raises(StateError, match="were averaged, cast to another type or edited"):
        pdp_fx.convert(average)
    average.get_submodule("pdp").load_state_dict(prepared.get_submodule("pdp").state_dict())
    pdp_fx.convert(average)
    with pytest.raises(StateError, match="were averaged, cast to another type or edited"):
        pdp_fx.convert(copy.deepcopy(prepared).type(torch.bfloat16))


@every_rule
def test_a_failed_verification_leaves_everything_untouched(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = net("conv")
    prepared = pruned(model, rule, x)
    before = snapshot(model), snapshot(prepared)
    fold = FoldBatchNorm.run

    def break_it(self: FoldBatchNorm, gm: fx.GraphModule, ctx: Context) -> bool:
        edited = fold(self, gm, ctx)
        gm.get_parameter("fc.bias").data += 1e-3
        return edited

    monkeypatch.setattr(FoldBatchNorm, "run", break_it)
    with pytest.raises(
        VerifyError, match=r"differs from the prepared one by \d.* The model you gave is untouched"
    ):
        pdp_fx.convert(prepared)
    assert_unchanged(model, before[0])
    assert_unchanged(prepared, before[1])
    monkeypatch.undo()
    assert difference(prepared.eval(), pdp_fx.convert(prepared), x) <= 1e-5


def test_rounding_alone_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference above the tolerance in float32 is looked at in float64, where it must vanish."""
    model, x = net("conv")
    prepared = pruned(model, Channels(ratio=0.5), x)
    monkeypatch.setitem(proving.TOLERANCE, torch.float32, 1e-12)
    converted = pdp_fx.convert(prepared)
    assert next(converted.parameters()).dtype == torch.float32
    assert 0.0 < difference(prepared.eval(), converted, x) <= 1e-5


class Amplifies(nn.Module):
    """Makes something of the last bits of float32, as an order of boxes with equal scores does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8), nn.Conv1d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.norm(self.stem(x)).relu())
        return 0.1 * y + (1e5 * y.detach()).sin()


def test_rounding_is_no_failure_even_if_it_spares_the_prepared_model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Amplifies(), torch.randn(1, 4, 512)
    model(x)
    prepared = pruned(model, Channels(ratio=0.5), x)
    # As if the model in float32 gave by chance what its twin in float64 gives.
    monkeypatch.setattr(proving, "relative_difference", lambda *given, **named: 0.0)
    converted = pdp_fx.convert(prepared)
    assert difference(prepared.eval(), converted, x) > 1e-3
    assert difference(prepared.double(), pdp_fx.convert(prepared), x.double()) <= 1e-9


class NormsInSinglePrecision(nn.Module):
    """Like the norms of language models, which cast to float32 whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.stem(x).float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.head(scaled.to(x.dtype))


def test_single_precision_inside_a_double_model_is_no_failure() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 6, dtype=torch.float64)
    prepared = pruned(NormsInSinglePrecision().double(), Channels(ratio=0.5), x)
    assert 1e-9 < difference(prepared.eval(), pdp_fx.convert(prepared), x) <= 1e-5


class FixedDtype(nn.Sequential):
    """Cannot run in float64."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(torch.bfloat16))


def test_rounding_of_half_precision_is_allowed_where_float64_cannot_prove() -> None:
    torch.manual_seed(0)
    model, x = FixedDtype(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)), torch.randn(8, 6)
    prepared = pruned(model.bfloat16(), Channels(ratio=0.5), x)
    assert 1e-4 < difference(prepared.eval(), pdp_fx.convert(prepared), x) <= 0.1


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """Let a conversion in this dtype, and not in float64, add 1 to a parameter."""
    fold = FoldBatchNorm.run

    def spoil_it(self: FoldBatchNorm, gm: fx.GraphModule, ctx: Context) -> bool:
        edited = fold(self, gm, ctx)
        gm.get_parameter(name).data += float(gm.get_parameter(name).dtype == dtype)
        return edited

    monkeypatch.setattr(FoldBatchNorm, "run", spoil_it)


def test_more_than_rounding_is_refused_where_float64_cannot_prove(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = FixedDtype(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 6)
    prepared = pruned(model.bfloat16(), Channels(ratio=0.5), x)
    spoil(monkeypatch, "2.bias", torch.bfloat16)
    with caplog.at_level(logging.INFO), pytest.raises(VerifyError, match="at most 1e-01 is expected"):
        pdp_fx.convert(prepared)
    assert "convert was checked in torch.bfloat16 only: the model cannot run in float64" in caplog.text


def test_a_fold_that_would_overflow_half_precision_is_not_made() -> None:
    """In float16 the folded bias would be infinite, and so would be the outputs."""
    model = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False), nn.BatchNorm2d(4, eps=1e-6)).half()
    scales = torch.tensor([1.0, 0.5, 0.25, 2.0])
    state = {"0.weight": scales.reshape(4, 1, 1, 1), "1.running_mean": 100 * scales}
    model.load_state_dict(state | {"1.running_var": torch.full((4,), 1e-6)}, strict=False)
    x = torch.full((1, 1, 3, 3), 100.0, dtype=torch.float16)
    prepared = pruned(model, Unstructured(0.25), x).eval()
    assert prepared(x).isfinite().all()
    assert difference(prepared, pdp_fx.convert(prepared), x) == 0


def test_numbers_that_become_infinite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 6)
    prepared = pruned(model.half(), Channels(ratio=0.5), x.half())
    fold = FoldBatchNorm.run

    def overflow(self: FoldBatchNorm, gm: fx.GraphModule, ctx: Context) -> bool:
        edited = fold(self, gm, ctx)
        if (bias := gm.get_parameter("2.bias")).dtype == torch.float16:
            bias.data += float("inf")
        return edited

    monkeypatch.setattr(FoldBatchNorm, "run", overflow)
    with pytest.raises(VerifyError, match="by inf of .* it is the rounding of torch.float16 that spoils it"):
        pdp_fx.convert(prepared)


def test_much_more_than_the_rounding_of_the_prepared_model_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 6)
    prepared = pruned(model.half(), Channels(ratio=0.5), x.half())
    spoil(monkeypatch, "2.bias", torch.float16)
    with pytest.raises(VerifyError, match="at most 2e-02 is expected.* In float64 it gives the same"):
        pdp_fx.convert(prepared)


class Labels(nn.Module):
    """Gives labels, and numbers that are as good as equal."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.head(functional.relu(self.norm(self.stem(x))))
        return x, x.argmax(1)


def test_labels_may_fall_otherwise_by_rounding_once_float64_has_shown_them_equal() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 6).bfloat16()
    prepared = pdp_fx.prepare(shake(Labels()).bfloat16(), at_once(Channels(ratio=0.5)), x).eval()
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared)
    mine, theirs = converted(x)[1], prepared(x)[1]
    assert 0 < (mine != theirs).sum() < 100


class TwoPrecisions(nn.Module):
    """Takes one input in half precision and the other in single."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.narrow(x).float() + self.wide(y)


def test_inputs_keep_the_dtype_that_a_part_of_the_model_has() -> None:
    x = torch.randn(2, 4)
    prepared = pdp_fx.prepare(TwoPrecisions(), at_once(Unstructured(0.5)), (x.bfloat16(), x))
    pdp_fx.step(prepared)
    assert pdp_fx.convert(prepared)(x.bfloat16(), x).dtype == torch.float32


class Chaotic(nn.Module):
    """Makes every difference larger some thirty times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.hidden, self.head = nn.Linear(6, 16), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.head(functional.gelu(self.hidden(functional.gelu(self.stem(x))))))
        for _ in range(33):
            x = 3.9 * x * (1 - x)
        return x


@pytest.mark.parametrize(("factor", "allowed"), [(1 + 2**-52, True), (1 + 2**-40, False)])
def test_a_model_that_amplifies_rounding_is_allowed_that_and_no_more(
    monkeypatch: pytest.MonkeyPatch, factor: float, allowed: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 6, dtype=torch.float64)
    prepared = pdp_fx.prepare(Chaotic().double(), at_once(Channels(ratio=0.5)), x)
    pdp_fx.step(prepared)
    fold = FoldBatchNorm.run

    def change_it(self: FoldBatchNorm, gm: fx.GraphModule, ctx: Context) -> bool:
        edited = fold(self, gm, ctx)
        gm.get_parameter("head.bias").data *= factor
        return edited

    monkeypatch.setattr(FoldBatchNorm, "run", change_it)
    if allowed:
        assert 1e-9 < difference(prepared.eval(), pdp_fx.convert(prepared), x) <= 1e-6
    else:
        with pytest.raises(VerifyError, match="differs from the prepared one by"):
            pdp_fx.convert(prepared)


def wrong_in(dtype: torch.dtype, factor: float) -> Callable[[FoldBatchNorm, fx.GraphModule, Context], bool]:
    """A pass that goes wrong in models of one dtype only."""
    fold = FoldBatchNorm.run

    def run(self: FoldBatchNorm, gm: fx.GraphModule, ctx: Context) -> bool:
        edited = fold(self, gm, ctx)
        weight = gm.get_parameter("fc.weight").data
        if weight.dtype == dtype:
            weight *= factor
        return edited

    return run


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float16, 1.3), (torch.bfloat16, 1.5), (torch.float32, 1.01)]
)
def test_what_float64_does_not_show_is_bounded_by_what_rounding_does(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, factor: float
) -> None:
    model, x = net("conv")
    model, x = model.to(dtype), x.to(dtype)
    prepared = pruned(model, Channels(ratio=0.5), x)
    converted = pdp_fx.convert(prepared)
    assert difference(prepared.eval(), converted, x) <= 16 * torch.finfo(dtype).eps
    monkeypatch.setattr(FoldBatchNorm, "run", wrong_in(dtype, factor))
    with pytest.raises(VerifyError, match="differs from the prepared one by"):
        pdp_fx.convert(prepared)


class OfOneDtype(nn.Module):
    """Cannot run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.stem(x))) @ torch.eye(4, dtype=torch.float32)


@pytest.mark.parametrize(("factor", "allowed"), [(1 + 5e-5, True), (1 + 1e-3, False)])
def test_a_model_that_cannot_run_in_float64_has_a_bound_of_its_own(
    monkeypatch: pytest.MonkeyPatch, factor: float, allowed: bool
) -> None:
    x = torch.randn(5, 6)
    prepared = pdp_fx.prepare(OfOneDtype(), at_once(Channels(ratio=0.5)), x)
    pdp_fx.step(prepared)
    monkeypatch.setattr(FoldBatchNorm, "run", wrong_in(torch.float32, factor))
    with nullcontext() if allowed else pytest.raises(VerifyError, match="at most 1e-04 is expected"):
        pdp_fx.convert(prepared)


class Noisy(nn.Module):
    """Draws random numbers in eval mode too, and returns logits that are partly -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = functional.relu(self.fc1(x))
        logits = self.fc2(x + 0.1 * torch.randn(()))
        masked = logits.masked_fill(torch.arange(4) == 2, float("-inf"))
        return {"logits": masked, "class": masked.argmax(1), "nothing": logits[:0]}


@every_rule
def test_random_infinite_and_empty_outputs_verify(rule: Rule) -> None:
    prepared = pdp_fx.prepare(Noisy(), at_once(rule), torch.randn(3, 8))
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared)
    assert set(converted(torch.randn(5, 8))) == {"logits", "class", "nothing"}


@every_rule
def test_a_converted_model_can_be_prepared_again(rule: Rule) -> None:
    model, x = net("residual")
    once = pdp_fx.convert(pruned(model, at_once(Channels(ratio=0.25)), x))
    again = pruned(once, rule, x)
    twice = pdp_fx.convert(again)
    assert difference(again.eval(), twice, x) <= 1e-5
    assert b"pdp_fx" not in pickle.dumps(twice)


class Modal(nn.Module):
    """Acts differently in training: an auxiliary head, functional dropout, noise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.fc2 = nn.Linear(16, 4)
        self.aux = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.fc1(x)))
        x = functional.dropout(x, 0.5, self.training)
        if self.training:
            return self.fc2(x + 0.1 * torch.randn_like(x)) + self.aux(x)
        return self.fc2(x)


@every_rule
def test_what_happens_in_training_only_is_gone(rule: Rule) -> None:
    model, x = shake(Modal()), torch.randn(6, 8)
    prepared = pruned(model, rule, x)
    converted = pdp_fx.convert(prepared)
    assert difference(prepared.eval(), converted, x) <= 1e-5
    assert [name for name, _ in converted.named_children()] == ["fc1", "fc2"]
    assert "training" not in str(converted.graph).replace("training: False", "")
    assert b"pdp_fx" not in pickle.dumps(converted)


class KeepsFeatures(Mlp):
    """A hook keeps what a layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        next(self.children()).register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self.kept = [output]


def test_what_a_hook_has_kept_of_the_last_forward_is_no_obstacle() -> None:
    x = torch.randn(4, 8)
    model = KeepsFeatures()
    prepared = pruned(model, Unstructured(0.5), x)
    prepared.train()(x).sum().backward()
    assert not model.kept[0].is_leaf
    assert difference(prepared.eval(), pdp_fx.convert(prepared), x) < 1e-6


def adds_one(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output + 1


def keeps_output(module: nn.Module, inputs: object, output: Tensor) -> None:
    vars(module)["kept"] = output.detach()


@pytest.mark.parametrize("hook", [adds_one, keeps_output])
@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8)])
def test_what_a_hook_adds_to_a_norm_is_0_for_no_channel(hook: Callable[..., object], norm: nn.Module) -> None:
    """A mask that the norm takes makes its own result 0, not what the hook makes of it."""
    norm = copy.deepcopy(norm)
    norm.register_forward_hook(hook)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    x = torch.randn(5, 8)
    prepared = pruned(model, Channels(0.5), x).eval()
    converted = pdp_fx.convert(prepared)
    assert converted.get_parameter("0.weight").shape == (4, 8)
    assert difference(prepared, converted, x) < 1e-6


class Locked(nn.Module):
    """Decides by its data, and holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lock = nn.Linear(8, 8), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else x


def test_a_model_that_cannot_be_copied_is_told() -> None:
    prepared = pruned(nn.Sequential(Locked(), nn.Linear(8, 2)), Unstructured(0.5), torch.randn(2, 8))
    with pytest.raises(StateError, match="the model cannot be copied: TypeError: cannot pickle"):
        pdp_fx.convert(prepared)


class ClampsLargeStates(nn.Module):
    """Its own forward looks at the numbers of its data: large ones take another path."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x).relu()
        if hidden.max() > 1:
            hidden = hidden / hidden.max()
        return self.out(hidden)


@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(2, 4)])
def test_single_weights_go_in_a_model_that_decides_by_its_data(rule: Rule) -> None:
    model, x = ClampsLargeStates(), torch.zeros(2, 3, 8)
    with pytest.raises(pdp_fx.TraceError, match=r"test_convert.py:\d+\).*such as nn.Sequential\(model\)"):
        pdp_fx.prepare(model, at_once(rule), x)
    prepared = pdp_fx.prepare(nn.Sequential(model), at_once(rule), x)
    pdp_fx.step(prepared)
    prepared(x).sum().backward()
    small = pdp_fx.convert(prepared)
    for inputs in (x, 9 * torch.randn(4, 3, 8)):
        torch.testing.assert_close(small(inputs), prepared.eval()(inputs))
    weights = [weight for name, weight in small.named_parameters() if name.endswith("weight")]
    assert sum(int((weight == 0).sum()) for weight in weights) == sum(map(torch.numel, weights)) // 2


class Unused(nn.Module):
    """Computes in training mode what nothing uses, in three steps of which the last takes the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            mean = x.mean()
            x = x + torch.sub(mean.exp(), mean)
        return self.last(x.relu())


def test_what_only_training_uses_is_erased_once() -> None:
    prepared = pdp_fx.prepare(Unused(), at_once(Channels(0.5)), torch.randn(2, 6))
    pdp_fx.step(prepared)
    assert not any(node.target in ("mean", "exp") for node in pdp_fx.convert(prepared).graph.nodes)


class Ragged(nn.Module):
    """Averages rows of given lengths by a nested tensor."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([row[:2] for row in x], layout=torch.jagged)
        return torch.stack([row.mean(0) for row in rows.unbind()])


def test_a_part_that_makes_nested_tensors_keeps_its_channels() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), Ragged(), nn.Linear(8, 3))
    prepared = pdp_fx.prepare(model, at_once(Channels(0.5)), torch.randn(2, 5, 6))
    pdp_fx.step(prepared)
    assert pdp_fx.convert(prepared).get_parameter("0.weight").shape == (4, 6)


class Writes(nn.Module):
    """Writes to the weight of its layer before each use."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.write = nn.Conv2d(8, 8, 1), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.layer.weight.data)
        return self.layer(x)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "clamped": lambda weight: weight.clamp_(-0.2, 0.2),
    "signs": lambda weight: weight.sign_(),
    "smaller each time": lambda weight: weight.mul_(0.9),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("rule", [Channels(ratio=0.5), Unstructured(0.6), NM(2, 4)], ids=rule_text)
def test_weights_that_the_model_writes_to_are_ranked_as_it_leaves_them(
    rule: Rule, write: Callable[[Tensor], object]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Writes(write), nn.Conv2d(8, 4, 3)).double()
    x = torch.randn(2, 3, 8, 8).double()
    prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=Schedule(0, 1.0)), x)
    prepared(x).square().mean().backward()
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter -= 0.05 * parameter.grad if parameter.grad is not None else 0
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared)
    torch.testing.assert_close(converted(x), prepared.eval()(x))
