"""Recurrent modules: their matrices are pruned one by one and N:M; what they read and their states go."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule, Unstructured
from pdp_fx.errors import SpecError, VerifyError
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

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(8, 8, batch_first=batch_first), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = self.inner.batch_first
        lengths = torch.full((x.shape[0 if first else 1],), 3 if first else 2)
        packed, _ = self.inner(pack_padded_sequence(x, lengths, batch_first=first))
        return self.head(pad_packed_sequence(packed, batch_first=first)[0])


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


class Translated(nn.Module):
    """A recurrent module that reads features which a mask makes 0, or does not."""

    def __init__(self, inner: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.before, self.act, self.inner = nn.Linear(6, 8), act, inner
        self.head = nn.LazyLinear(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.act(self.before(x)))[0])


@every_kind
@pytest.mark.parametrize("act", [nn.ReLU(), nn.Sigmoid()], ids=["zero", "not zero"])
def test_features_that_a_recurrent_module_reads_are_removed(name: str, act: nn.Module) -> None:
    torch.manual_seed(0)
    model, x = Translated(copy.deepcopy(KINDS[name]), act), torch.randn(2, 5, 6)
    model(x)
    model, x = model.double(), x.double()
    spec = PruneSpec(Channels(ratio=0.5), schedule=AT_ONCE, allocation="uniform")
    prepared = pdp_fx.prepare(model, spec, x)
    pdp_fx.step(prepared)
    train(prepared, [(x,)])
    small = check_converted(model, prepared.eval(), [(x,), (torch.randn(3, 7, 6, dtype=x.dtype),)])
    inner, before = (cast(nn.RNNBase, each.get_submodule("inner")) for each in (small, model))
    assert (inner.input_size, inner.get_parameter("weight_ih_l0").shape[1]) == (4, 4)
    assert (2 * inner.hidden_size, 2 * inner.proj_size) == (before.hidden_size, before.proj_size)


def test_an_lstm_is_looked_into_where_torch_computes_it_as_one() -> None:
    model, x = Translated(nn.LSTM(8, 8), nn.ReLU()), torch.randn(2, 5, 6)
    model(x)
    fast = torch.backends.mkldnn.enabled
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(ratio=0.5), schedule=AT_ONCE), x)
    assert torch.backends.mkldnn.enabled == fast
    pdp_fx.step(prepared)
    small = pdp_fx.convert(prepared)
    assert small.get_submodule("inner").input_size == 4
    torch.testing.assert_close(small(x), prepared.eval()(x))


class CellsOfFeatures(nn.Module):
    """A cell reads a token after the other; the first state is another layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.start, self.cell, self.head = (
            nn.Linear(6, 8), nn.Linear(6, 4), nn.GRUCell(8, 4), nn.Linear(4, 5)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        state = self.start(x[:, 0])
        for token in self.before(x).relu().unbind(1):
            state = self.cell(token, state)
        return self.head(state)


def test_features_that_cells_read_are_removed() -> None:
    torch.manual_seed(0)
    model, x = CellsOfFeatures().double(), torch.randn(2, 3, 6, dtype=torch.float64)
    _, left = check(model, x, Channels(ratio=0.5))
    assert (left["before.weight"].shape, left["start.weight"].shape) == ((4, 6), (2, 6))
    assert (left["cell.weight_ih"].shape, left["cell.weight_hh"].shape) == ((6, 4), (6, 2))


class OneStep(nn.Module):
    """A cell that runs once, from a state of another layer."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.before, self.start, self.cell = nn.Linear(6, 8), nn.Linear(6, 4), cell
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        features, state = self.before(x).relu(), self.start(x)
        pair = isinstance(self.cell, nn.LSTMCell)
        after = self.cell(input=features, hx=(state, state.tanh()) if pair else state)
        return self.head(after[0] if pair else after)


@pytest.mark.parametrize("cell", [nn.LSTMCell(8, 4), nn.GRUCell(8, 4), nn.RNNCell(8, 4)], ids=repr)
def test_the_state_of_a_single_step_goes(cell: nn.Module) -> None:
    torch.manual_seed(0)
    model, x = OneStep(copy.deepcopy(cell)).double(), torch.randn(2, 6, dtype=torch.float64)
    _, left = check(model, x, Channels(ratio=0.5))
    assert (left["before.weight"].shape, left["start.weight"].shape) == ((4, 6), (2, 6))
    assert left["cell.weight_hh"].numel() == model.get_parameter("cell.weight_hh").numel() // 4


class Hidden(nn.Module):
    """A recurrent module of 8 states; subclasses show what is done with them."""

    inner: nn.Module
    width = 8

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = self.make(), nn.Linear(self.width, 3)

    def make(self) -> nn.Module:
        return nn.LSTM(6, 8, batch_first=True)


class FromZeros(Hidden):
    """The model makes the first states."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.zeros(1, x.shape[0], 8, dtype=x.dtype), x.new_zeros(1, x.shape[0], 8)
        return self.head(self.inner(x, first)[0])


class FromLearned(Hidden):
    """The first states are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ParameterList(nn.Parameter(torch.randn(1, 1, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.first
        return self.head(self.inner(x, (h.expand(1, x.shape[0], 8).contiguous(), c.repeat(1, len(x), 1)))[0])


class FromItsFeatures(Hidden):
    """The first state is made of the first token's features."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 8)

    def make(self) -> nn.Module:
        return nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        features = self.before(x).relu()
        return self.head(self.inner(features, features[:, 0][None].contiguous())[0])


class Decoded(Hidden):
    """The states of one are the first of the other, which then reads what it has said."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.LSTM(3, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        said, state = x[:, :1, :3], self.inner(x)[1]
        spoken: list[Tensor] = []
        for _ in range(3):
            state_of_token, state = self.decoder(said, state)
            said = self.head(state_of_token)
            spoken.append(said)
        return torch.cat(spoken, 1)


class BothWays(Hidden):
    """The last states of two directions are joined, by how many layers there are."""

    width = 16

    def make(self) -> nn.Module:
        return nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        last = self.inner(x)[1][0].view(2, 2, x.shape[0], 8)[-1]
        return self.head(last.transpose(0, 1).reshape(x.shape[0], -1))


class SumOfWays(BothWays):
    """The directions are added, by their width."""

    width = 8

    def forward(self, x: Tensor) -> Tensor:
        states = self.inner(x)[0]
        return self.head(states[..., :8] + states[..., 8:])


class LastOfPacked(Hidden):
    """Sequences of several lengths; the last states go on."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((x.shape[0],), 3)
        return self.head(self.inner(pack_padded_sequence(x, lengths, batch_first=True))[1][0][-1])


class GreatestOfPacked(Hidden):
    """Sequences of several lengths, both ways; what is greatest over time goes on, and padding never is."""

    width = 16

    def make(self) -> nn.Module:
        return nn.LSTM(6, 8, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 1:, 0] > 0).sum(1)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.inner(packed)[0], batch_first=True, padding_value=-torch.inf)
        return self.head(padded.amax(1))


class Attended(Hidden):
    """The last state chooses among the others, which a residual stream takes in."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        states, (last, _) = self.inner(x)
        weights = torch.softmax(torch.bmm(states, last[-1][..., None]), 1)
        return self.head((weights * states).sum(1) + self.skip(x).mean(1))


class CellByCell(Hidden):
    """Two cells in a loop over time, the second without a first state."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.GRUCell(8, 8)

    def make(self) -> nn.Module:
        return nn.LSTMCell(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, c, last = x.new_zeros(x.shape[0], 8), x.new_zeros(x.shape[0], 8), None
        for token in x.unbind(1):
            h, c = self.inner(token, (h, c))
            last = self.outer(h, last)
        return self.head(last)


class OneStepAlone(Hidden):
    """A cell that is called once, without a first state."""

    def make(self) -> nn.Module:
        return nn.RNNCell(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x[:, 0]))


class OneStepOfLayer(Hidden):
    """A layer that goes through one token only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x[:, :1])[0])


class OneStepFromElsewhere(Hidden):
    """A cell that is called once, with states that two layers have made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(6, 8)

    def make(self) -> nn.Module:
        return nn.LSTMCell(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x[:, 0], (self.first(x[:, 1]), self.second(x[:, 2])))[0])


STATES = (
    *(OneStepAlone, OneStepOfLayer, OneStepFromElsewhere),
    *(FromZeros, FromLearned, FromItsFeatures, Decoded, BothWays, SumOfWays, LastOfPacked, Attended),
    *(CellByCell, GreatestOfPacked),
)


@pytest.mark.parametrize("kind", STATES)
def test_states_are_removed(kind: type[Hidden]) -> None:
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(2, 5, 6, dtype=torch.float64)
    spec = PruneSpec(Channels(ratio=0.5), schedule=AT_ONCE, allocation="uniform")
    prepared = pdp_fx.prepare(model, spec, x)
    train(prepared, [(x,)])
    pdp_fx.step(prepared)
    train(prepared, [(x,)])
    small = check_converted(model, prepared.eval(), [(x,), (torch.randn(3, 5, 6, dtype=x.dtype),)])
    for name, module in small.named_modules():
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            assert module.hidden_size == 4, name
            assert all(each.shape[0] in (4, 12, 16) for each in module.parameters()), name


class GivenStates(Hidden):
    """The first states are inputs, as those of a stream."""

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return self.head(self.inner(x, (h, c))[0])


class GivesStates(Hidden):
    """The last states are outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states, (last, _) = self.inner(x)
        return self.head(states), last


def test_states_that_go_in_and_out_stay() -> None:
    x, first = torch.randn(2, 5, 6), torch.randn(1, 2, 8)
    with pytest.raises(SpecError, match="inner: %inner .* joins these channels with values that have none"):
        pdp_fx.prepare(GivenStates(), PruneSpec(Channels(ratio=0.5)), (x, first, first))
    with pytest.raises(SpecError, match="inner: %output: the model returns these channels"):
        pdp_fx.prepare(GivesStates(), PruneSpec(Channels(ratio=0.5)), x)


class OfLines(nn.Module):
    """Channels of an image lie along the time that a recurrent module goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Conv1d(3, 8, 1), nn.GRU(5, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))[0][:, -1]


def test_channels_that_are_time_stay() -> None:
    with pytest.raises(SpecError, match="before: %inner "):
        pdp_fx.prepare(OfLines(), PruneSpec(Channels(ratio=0.5)), torch.randn(2, 3, 5))


@pytest.mark.parametrize("batch_first", [True, False])
def test_channels_of_packed_sequences_are_removed(batch_first: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), Packed(batch_first)).double(), torch.randn(2, 3, 6).double()
    _, left = check(model, x, Channels(ratio=0.5))
    assert (left["0.weight"].shape, left["1.inner.weight_ih_l0"].shape) == ((4, 6), (12, 4))
    assert left["1.head.weight"].shape == (5, 4)


class OfLengths(nn.Module):
    """Sequences of the lengths that are given."""

    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__()
        width = (inner.proj_size or inner.hidden_size) * (1 + inner.bidirectional)
        self.before, self.inner, self.head = nn.Linear(6, 8), inner, nn.Linear(width, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.before(x).relu(), lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0])


@pytest.mark.parametrize("name", KINDS)
def test_states_are_read_where_every_sequence_of_the_example_is_one_step(name: str) -> None:
    torch.manual_seed(0)
    model = OfLengths(cast(nn.RNNBase, copy.deepcopy(KINDS[name]))).double()
    x, once, longer = torch.randn(2, 5, 6).double(), torch.tensor([1, 1]), torch.tensor([3, 5])
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(ratio=0.5), schedule=AT_ONCE), (x, once))
    pdp_fx.step(prepared)
    train(prepared, [(x, longer)])
    converted = check_converted(model, prepared.eval(), [(x, once), (x, longer)])
    width = model.inner.proj_size or model.inner.hidden_size
    assert converted.get_parameter("inner.weight_hh_l0").shape[1] < width


@pytest.mark.parametrize("ratio", [0.4, 0.6, 0.9])
def test_more_hidden_units_stay_than_projected_ones(ratio: float) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        inner = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True, proj_size=4)
        model, x = OfLengths(inner).double(), torch.randn(2, 5, 6).double()
        example = x, torch.tensor([3, 5])
        prepared = pdp_fx.prepare(model, PruneSpec(Channels(ratio=ratio), schedule=AT_ONCE), example)
        pdp_fx.step(prepared)
        converted = check_converted(model, prepared.eval(), [example])
        small = cast(nn.LSTM, converted.get_submodule("inner"))
        assert 4 > small.proj_size < small.hidden_size < 6


def test_what_one_step_does_not_show_is_shown_by_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdp_fx.channels.running._FlowInterpreter.read_state", lambda *_: None)
    torch.manual_seed(0)
    model = OfLengths(nn.GRU(8, 8, batch_first=True)).double()
    example = torch.randn(2, 5, 6).double(), torch.tensor([1, 1])
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(ratio=0.5), schedule=AT_ONCE), example)
    pdp_fx.step(prepared)
    with pytest.raises(VerifyError, match="of the output's scale on other numbers"):
        pdp_fx.convert(prepared)


def test_the_time_of_packed_sequences_stays() -> None:
    model = nn.Sequential(nn.Conv1d(5, 8, 1), Packed())
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(ratio=0.5)), torch.randn(2, 5, 8))
    (time,) = [kept for kept in pdp_fx.explain(prepared).kept if kept.group == "0"]
    assert (time.width, time.nodes) == (8, ("_pack_padded_sequence",))


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


def test_threads_that_evaluate_one_model_leave_it_its_parameters() -> None:
    model, x = reader("LSTM")
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.5), schedule=AT_ONCE), x)
    pdp_fx.step(prepared)
    prepared.eval()
    before = dict(prepared.named_parameters())
    layer: Any = next(each for each in prepared.modules() if isinstance(each, nn.LSTM))
    meet, inside = threading.Barrier(2), layer.check_forward_args

    def waits(*given: Any) -> None:
        meet.wait(60)  # Both threads are in the layer's forward at once.
        inside(*given)

    layer.check_forward_args = waits
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(prepared, (x, x))
    torch.testing.assert_close(first, second)
    now = dict(prepared.named_parameters())
    assert now.keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in now.items())
