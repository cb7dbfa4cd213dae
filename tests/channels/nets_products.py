"""Products with matrices whose elements are channels: of what layers make, one matrix for each example."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, sequences, vectors

WIDTH, SIZE, FEATURES, TARGETS = 6, 8, 3, 5


class DotsOfFeatures(nn.Module):
    """Recommenders take dot products of all pairs of features: the channels inside them are contracted."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleList(nn.Linear(WIDTH, SIZE) for _ in range(FEATURES))
        self.out = nn.Linear(FEATURES**2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = [layer(x[:, 0]) for layer in self.features]
        stacked = torch.cat(made, 1).view(x.shape[0], -1, made[0].shape[1])
        return self.out((stacked @ stacked.transpose(1, 2)).flatten(1))


class DotsOfNumberedFeatures(DotsOfFeatures):
    """The number of features and their width are written down."""

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.cat([layer(x[:, 0]) for layer in self.features], 1).view(-1, FEATURES, SIZE)
        return self.out(torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1))


class MadeLayer(nn.Module):
    """A hypernetwork makes a layer's weight and bias: the channels that the layer puts out can go."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Linear(WIDTH, WIDTH * SIZE), nn.Linear(WIDTH, SIZE)
        self.out = nn.Linear(SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.mean(1)
        weight, bias = self.weight(seen).view(-1, WIDTH, SIZE), self.bias(seen).unsqueeze(1)
        return self.out(F.elu(torch.bmm(x, weight) + bias))


class MadeRows(nn.Module):
    """The made matrix stands on the left: its rows are channels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Linear(WIDTH, SIZE * WIDTH), nn.Linear(SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.bmm(self.weight(x.mean(1)).view(-1, SIZE, WIDTH), x.transpose(1, 2))
        return self.out(made.relu().transpose(1, 2))


class MadeTwice(nn.Module):
    """A made matrix is contracted with channels, which go together with the channels inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(WIDTH, SIZE)
        self.weight = nn.Linear(WIDTH, SIZE * TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.hidden(x).relu(), self.weight(x.mean(1)).view(-1, SIZE, TARGETS))


class MadeKeys(nn.Module):
    """Keys and values are few and made of the mean: the channels inside them go, with the query's."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, SIZE)
        self.key, self.value = (nn.Linear(WIDTH, TARGETS * SIZE) for _ in range(2))
        self.out = nn.Linear(SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.mean(1)
        key, value = (layer(seen).view(-1, TARGETS, SIZE) for layer in (self.key, self.value))
        return self.out(F.scaled_dot_product_attention(self.query(x), key, value, scale=0.5))


class SumsOverNeighbours(nn.Module):
    """A graph network sums over the neighbours of nodes, whose adjacency matrix is stored sparsely."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, SIZE), nn.Linear(SIZE, WIDTH)
        joined = torch.eye(TARGETS, dtype=torch.float64).roll(1, 0) + torch.eye(TARGETS)
        self.register_buffer("joined", joined.to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        joined = self.joined.to(x.dtype)
        return torch.sparse.mm(joined, self.out(torch.relu(joined @ self.inner(x))))


class SparseMixture(nn.Module):
    """A sparse matrix mixes channels, so that they stay."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, SIZE), nn.Linear(SIZE, WIDTH)
        self.register_buffer("mixing", torch.eye(SIZE, dtype=torch.float64).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sparse.mm(self.mixing, self.inner(x).t()).t())


class MatrixTimesVector(nn.Module):
    """Matrices times vectors, all of them parameters, are added to channels (aten.mv, aten.addmv)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, SIZE), nn.Linear(SIZE, WIDTH)
        self.square, self.vector = nn.Parameter(torch.randn(SIZE, SIZE)), nn.Parameter(torch.randn(SIZE))
        self.rows, self.short = nn.Parameter(torch.randn(SIZE, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) + self.square @ self.vector
        return self.out(x + torch.addmv(self.vector, self.rows, self.short))


class VectorOfChannels(nn.Module):
    """A matrix times a vector of channels makes channels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, SIZE), nn.Linear(SIZE, WIDTH)
        self.square = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.out(x + torch.mv(self.square, x[0].relu()))


def _nodes(batch: int) -> tuple[Tensor]:
    return (torch.randn(TARGETS, WIDTH, dtype=torch.float64),)


PRODUCTS: tuple[Construct, ...] = (
    Construct(MatrixTimesVector, vectors(), removed=4),
    Construct(VectorOfChannels, vectors(), removed=4),
    Construct(SumsOverNeighbours, _nodes, removed=4, batches=False),
    Construct(SparseMixture, vectors(), reason="contracted with values that have no channels"),
    Construct(DotsOfFeatures, sequences(), removed=12),
    Construct(DotsOfNumberedFeatures, sequences(), removed=12),
    Construct(MadeLayer, sequences(), removed=28),
    Construct(MadeRows, sequences(), removed=24),
    Construct(MadeTwice, sequences(), removed=24),
    Construct(MadeKeys, sequences(), removed=40),
)
