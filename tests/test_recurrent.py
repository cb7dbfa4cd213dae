"""Recurrent modules: their matrices are pruned one by one and N:M, their channels stay."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule, Unstructured
from pdp_fx.spec import Rule
from tests.channels.checks import check_converted, train

AT_ONCE = Schedule(0, 1.0)
KINDS: dict[str, nn.Module] = {
    "LSTM": nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True),
    "LSTM with projections": nn.LSTM(8, 8, batch_first=True, proj_size=4),
    "GRU": nn.GRU(8, 12, 2, batch_first=True, dropout=0.0),
    "RNN": nn.RNN(8, 12, batch_first=True, nonlinearity="relu", bias=False),
}
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
every_kind = pytest.mark.parametrize("name", KINDS)


class Reader(nn.Module):
    """A recurrent module between two layers; its last state goes out, too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(20, 8), inner
        self.head = nn.LazyLinear(5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.inner(self.words(x))
        return self.head(states), last[0] if isinstance(last, tuple) else last


class Cells(nn.Module):
    """Three cells, one after another, in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.LSTMCell(6, 8), nn.GRUCell(8, 8), nn.RNNCell(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(x.shape[0], 8), x.new_zeros(x.shape[0], 8)
        second, third = x.new_zeros(x.shape[0], 8), x.new_zeros(x.shape[0], 4)
        for step in range(3):
            h, c = self.one(x[:, step], (h, c))
            second = self.two(h, second)
            third = self.three(second, third)
        return third


class Packed(nn.Module):
    """Sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((x.shape[0],), 3)
        packed, _ = self.inner(pack_padded_sequence(x, lengths, batch_first=True))
        return self.head(pad_packed_sequence(packed, batch_first=True)[0])


def reader(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Reader(copy.deepcopy(KINDS[name])), torch.randint(0, 20, (2, 5))
    model(x)
    return model.double(), x


def check(model: nn.Module, x: Tensor, rule: Rule) -> tuple[set[str], dict[str, nn.Parameter]]:
    """Prune, train and convert; the names of the pruned weights, and all parameters that are left."""
    prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=AT_ONCE, allocation="uniform"), x)
    before = [parameter.clone() for parameter in prepared.parameters()]
    train(prepared, [(x,)])
    pdp_fx.step(prepared)
    train(prepared, [(x,)])
    assert all(not a.equal(b) for a, b in zip(before, prepared.parameters(), strict=True))
    left = dict(check_converted(model, prepared.eval(), [(x,)]).named_parameters())
    return {weight.name for weight in pdp_fx.explain(prepared).weights}, left


@every_kind
def test_every_matrix_loses_its_share(name: str) -> None:
    model, x = reader(name)
    pruned, left = check(model, x, Unstructured(0.5))
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    assert pruned == matrices - {"words.weight"}
    for each in pruned:
        assert int((left[each] == 0).sum()) == round(0.5 * left[each].numel())


@every_kind
def test_groups_of_inputs_are_pruned(name: str) -> None:
    model, x = reader(name)
    pruned, left = check(model, x, NM(2, 4))
    assert {name for name in pruned if "weight_hh" in name}
    for each in pruned:
        assert bool(((left[each].reshape(-1, 4) == 0).sum(1) == 2).all())


def test_channels_around_a_recurrent_module_stay() -> None:
    model, x = reader("LSTM")
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.5), {"words": Channels(ratio=0.5)}), x)
    assert not pdp_fx.explain(prepared).groups
    assert any("LSTM" in kept.why for kept in pdp_fx.explain(prepared).kept)


def test_cells_are_pruned() -> None:
    torch.manual_seed(0)
    pruned, left = check(Cells().double(), torch.randn(2, 3, 6, dtype=torch.float64), Unstructured(0.5))
    assert pruned == {f"{cell}.weight_{part}" for cell in ("one", "two", "three") for part in ("ih", "hh")}
    assert all(int((left[name] == 0).sum()) == left[name].numel() // 2 for name in pruned)


def test_packed_sequences_are_read_by_masked_weights() -> None:
    torch.manual_seed(0)
    pruned, _ = check(Packed().double(), torch.randn(2, 3, 8, dtype=torch.float64), Unstructured(0.5))
    assert pruned == {"inner.weight_ih_l0", "inner.weight_hh_l0", "head.weight"}


def test_the_users_module_keeps_its_own_weights() -> None:
    model, x = reader("LSTM")
    expected = model(x)[0]
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.9), schedule=AT_ONCE), x)
    pdp_fx.step(prepared)
    assert not torch.equal(prepared.eval()(x)[0], expected)
    pdp_fx.convert(prepared)
    prepared.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()}, assign=True)
    assert torch.equal(model(x)[0], expected)
