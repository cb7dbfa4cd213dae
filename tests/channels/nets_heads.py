"""What heads of attention meet in models of language, sound and images: tables, masks, states and systems."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, Inputs, sequences

WIDTH, HEADS, SIZE, STATES = 6, 3, 4, 5


def _with_mask(batch: int) -> Inputs:
    """Sequences, and what is added for each pair of places, in all heads alike."""
    (x,) = sequences()(batch)
    return x, torch.randn(batch, x.shape[1], x.shape[1], dtype=x.dtype)


def _with_places(batch: int) -> Inputs:
    """Sequences, and numbers by which their places are ordered."""
    (x,) = sequences()(batch)
    return x, torch.rand(batch, x.shape[1], dtype=x.dtype)


class Attention(nn.Module):
    """Three heads; the variants below change what they compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return q, k, v

    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.out(y.transpose(1, 2).flatten(2))


class MaskRepeated(Attention):
    """A mask of one head is copied for all, as often as the code says."""

    def copied(self, mask: Tensor, heads: int) -> Tensor:
        return mask.unsqueeze(1).repeat(1, HEADS, 1, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.joined(x, F.scaled_dot_product_attention(q, k, v, self.copied(mask, q.shape[1])))


class MaskRepeatedByShape(MaskRepeated):
    """As often as there are heads."""

    def copied(self, mask: Tensor, heads: int) -> Tensor:
        return mask[:, None].repeat((1, heads, 1, 1))


class MaskTiled(MaskRepeated):
    """By the function that NumPy has, too."""

    def copied(self, mask: Tensor, heads: int) -> Tensor:
        return torch.tile(mask[:, None], dims=(1, heads, 1, 1))


class MaskInterleaved(MaskRepeated):
    """Each index along the axis of one head is copied."""

    def copied(self, mask: Tensor, heads: int) -> Tensor:
        return mask.unsqueeze(1).repeat_interleave(heads, dim=1)


class MaskInterleavedByNumber(MaskRepeated):
    """The same with the number written down, and by the function."""

    def copied(self, mask: Tensor, heads: int) -> Tensor:
        return torch.repeat_interleave(mask.unsqueeze(1), HEADS, dim=1)


class MaskInBatch(Attention):
    """Copies of the mask lie along the batch, where the heads are, as in `nn.MultiheadAttention`."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (each.flatten(0, 1) for each in self.heads(x))
        copies = mask.unsqueeze(1).repeat(1, HEADS, 1, 1).flatten(0, 1)
        y = (torch.baddbmm(copies, q, k.transpose(-2, -1), alpha=0.5).softmax(-1)) @ v
        return self.joined(x, y.view(x.shape[0], -1, x.shape[1], SIZE))


class SharedPlaces(Attention):
    """Values made for one head are copied for all and added: they stay, and heads can go."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Linear(WIDTH, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k = k + self.places(x).unsqueeze(1).repeat(1, HEADS, 1, 1)
        return self.joined(x, F.scaled_dot_product_attention(q, k, v))


class TokensChosen(nn.Module):
    """Tokens are picked by an index that is copied for each channel, as in masked autoencoders."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.token = nn.Linear(WIDTH, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.out = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        hidden = self.first(x)
        index = order.argsort(1)[:, :3].unsqueeze(-1).repeat(1, 1, hidden.shape[-1])
        chosen = torch.gather(hidden, 1, index)
        return self.out(torch.cat([self.token.expand(len(x), -1, -1), chosen], 1).relu())


class HeadsMixed(nn.Module):
    """A matrix mixes heads, and its columns pair up with the channels inside these (tensor trains)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.matrix = nn.Linear(WIDTH, 8), nn.Parameter(torch.randn(2, 3))
        self.out = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.first(x).relu().unflatten(-1, (2, 4))
        return self.out(torch.einsum("...ij,ip->...jp", heads, self.matrix).flatten(-2))


class RotaryAsWideAsTable(Attention):
    """A part of each head is turned, as wide as a table whose columns are copied one by one (Moonshine)."""

    rate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.rand(SIZE // 4))

    def angles(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype)
        return (place[:, None] * self.rate).repeat_interleave(2, dim=-1)

    def turn(self, x: Tensor, angles: Tensor) -> Tensor:
        wide = angles.shape[-1]
        turned, passed = x[..., :wide], x[..., wide:]
        left, right = turned.chunk(2, -1)
        turned = turned * angles.cos() + torch.cat([-right, left], -1) * angles.sin()
        return torch.cat([turned, passed], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        angles = self.angles(x)
        return self.joined(x, F.scaled_dot_product_attention(self.turn(q, angles), self.turn(k, angles), v))


class RotaryAsWideAsHalfTable(RotaryAsWideAsTable):
    """The first half of the columns of a doubled table, each copied (GLM)."""

    def angles(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype)
        both = torch.cat([place[:, None] * self.rate] * 2, -1)
        return both[..., : both.shape[-1] // 2].repeat_interleave(2, dim=-1)


class RotaryPairs(Attention):
    """Pairs of neighbours are turned and laid out as the query is (RoFormer)."""

    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sin", torch.randn(9, SIZE))

    def turn(self, x: Tensor) -> Tensor:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape_as(x)
        return x + turned * self.sin[: x.shape[2]]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.joined(x, F.scaled_dot_product_attention(self.turn(q), self.turn(k), v))


class StateOfZeros(Attention):
    """Linear attention begins with a state of zeros for each head (MiniMax)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        state = torch.zeros(x.shape[0], HEADS, SIZE, SIZE, dtype=x.dtype)
        first = q @ state
        state = 0.5 * state + k.transpose(-2, -1) @ v
        return self.joined(x, first + q @ state)


class NoLocalHeads(Attention):
    """Heads are split into local and other ones, of which there may be none of either."""

    local = 0

    def forward(self, x: Tensor) -> Tensor:
        parts = [(each[:, : self.local], each[:, self.local :]) for each in self.heads(x)]
        both = zip(*parts, strict=True)
        found = [F.scaled_dot_product_attention(*part) for part in both if part[0].shape[1] > 0]
        return self.joined(x, torch.cat(found, 1))


class SystemInHeads(Attention):
    """Each head solves a triangular system (gated delta nets)."""

    def forward(self, x: Tensor) -> Tensor:
        _, k, v = self.heads(x)
        system = 0.1 * (k @ k.transpose(-2, -1)).tril(-1) + torch.eye(x.shape[1], dtype=x.dtype)
        return self.joined(x, torch.linalg.solve_triangular(system, v, upper=False, unitriangular=True))


class SystemFromTheRight(Attention):
    """The unknowns stand on the left of the system."""

    def forward(self, x: Tensor) -> Tensor:
        _, k, v = self.heads(x)
        system = 0.1 * (k @ k.transpose(-2, -1)).tril(-1) + torch.eye(x.shape[1], dtype=x.dtype)
        solved = torch.linalg.solve_triangular(system, v.transpose(-2, -1), upper=False, left=False)
        return self.joined(x, solved.transpose(-2, -1))


class SharedSystem(nn.Module):
    """One system for all examples: the columns of what is given are solved alone, and can go."""

    system: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.register_buffer("system", torch.eye(5) + torch.rand(5, 5).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.linalg.solve_triangular(self.system, self.first(x), upper=True))


class SystemOfChannels(nn.Module):
    """Channels are the unknowns of a system, which mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.register_buffer("system", torch.eye(5) + torch.rand(5, 5).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).transpose(1, 2)
        return self.out(torch.linalg.solve_triangular(self.system, hidden, upper=True).transpose(1, 2))


class RepairsInTraining(nn.Module):
    """In training, numbers that are not finite are replaced, as in detection transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if self.training and not torch.isfinite(x).all():
            x = x.clamp(-1e9, 1e9)
        return self.out(self.second(x).relu())


class RepairsAlways(RepairsInTraining):
    """The same in eval mode, too, where it asks for numbers of all channels."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if x.isnan().any():
            x = torch.nan_to_num(x)
        return self.out(self.second(x).relu())


class LatentHeads(Attention):
    """Keys and values come from a narrow stream that is viewed as one head (multi-head latent attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 5), nn.Linear(5, HEADS * 2 * SIZE)

    def latent(self, x: Tensor) -> Tensor:
        return self.down(x).view(x.shape[0], 1, x.shape[1], 5)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.latent(x)
        b, _, t, _ = latent.shape
        k, v = self.up(latent).view(b, t, -1, 2 * SIZE).transpose(1, 2).split(SIZE, -1)
        return self.joined(x, F.scaled_dot_product_attention(self.heads(x)[0], k, v))


class LatentHeadsUnsqueezed(LatentHeads):
    def latent(self, x: Tensor) -> Tensor:
        return self.down(x).unsqueeze(1)


class QueriesPastOneHead(Attention):
    """One head of keys and values serves all queries, which are viewed as one head first (GPT-BigCode)."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(WIDTH, (HEADS + 2) * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.all(x).unsqueeze(1).split([HEADS * SIZE, SIZE, SIZE], 3)
        q = q.view(b, t, -1, SIZE).transpose(1, 2)
        k, v = (each.expand(-1, q.shape[1], -1, -1) for each in (k, v))
        return self.joined(x, F.scaled_dot_product_attention(q, k, v))


class GatesForGroups(nn.Module):
    """Each group of heads has a gate, copied to a number of heads that the code says, twice (Mamba 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, 8 * SIZE + 4 * SIZE), nn.Linear(8 * SIZE, WIDTH)

    def copied(self, gates: Tensor, heads: Tensor) -> Tensor:
        return gates.repeat_interleave(2, dim=2, output_size=8)

    def forward(self, x: Tensor) -> Tensor:
        heads, gates = self.inner(x).split([8 * SIZE, 4 * SIZE], -1)
        heads, gates = heads.unflatten(-1, (-1, SIZE)), gates.unflatten(-1, (-1, SIZE))
        return x + self.out((heads * self.copied(gates, heads)).flatten(2))


class GatesForGroupsByShape(GatesForGroups):
    def copied(self, gates: Tensor, heads: Tensor) -> Tensor:
        return gates.repeat_interleave(2, dim=2, output_size=heads.shape[2])


class ScanOfGroups(nn.Module):
    """Heads in groups that share states and have a gated norm each, by numbers made of sizes (Mamba 2)."""

    groups: int = 2

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * 4 * SIZE + self.groups * 2 * STATES)
        self.weight, self.out = nn.Parameter(torch.rand(4 * SIZE)), nn.Linear(4 * SIZE, WIDTH)

    def norm(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x * F.silu(gate)
        *first, last = x.shape
        size = 4 * SIZE // self.groups
        x = x.view(*first, last // size, size)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.view(*first, last // size * size)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.groups * STATES
        gate, heads, *states = self.inner(x).split([4 * SIZE, 4 * SIZE, inside, inside], -1)
        heads = heads.reshape(*x.shape[:2], -1, SIZE)
        shared = [each.reshape(*x.shape[:2], self.groups, -1) for each in states]
        times = heads.shape[2] // shared[0].shape[2]
        keys, queries = (each.repeat_interleave(times, dim=2, output_size=heads.shape[2]) for each in shared)
        kept = torch.einsum("bshn,bshp->bhpn", keys, heads)
        return self.out(self.norm(torch.einsum("bshn,bhpn->bshp", queries, kept).flatten(2), gate))


class ScanOfOneGroup(ScanOfGroups):
    """What is inside the only group can go: heads, and states."""

    groups = 1


class GroupedByHand(nn.Module):
    """Two heads of keys and values serve four of queries; values are split and copied before (below)."""

    def __init__(self, joined: int = 8 * SIZE) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, count * SIZE) for count in (4, 2, 2))
        self.out = nn.Linear(joined, WIDTH)

    def heads(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x).view(x.shape[0], x.shape[1], -1, SIZE).transpose(1, 2)

    def copied(self, heads: Tensor) -> Tensor:
        b, _, t, size = heads.shape
        return heads[:, :, None].expand(b, 2, 2, t, size).reshape(b, 4, t, size)

    def attended(self, x: Tensor, v: Tensor) -> Tensor:
        q, k = self.heads(self.q, x), self.copied(self.heads(self.k, x))
        return F.scaled_dot_product_attention(q, k, self.copied(v)).transpose(1, 2)


class ValuesRepeated(GroupedByHand):
    """Each head of the values is copied for all heads of the keys, and these for all of the queries."""

    def forward(self, x: Tensor) -> Tensor:
        v = self.heads(self.v, x)
        each = (half.repeat(1, 2, 1, 1) for half in (v[:, :1], v[:, 1:]))
        return self.out(torch.cat([self.attended(x, half) for half in each], -1).flatten(2))


class DifferenceOfHalves(GroupedByHand):
    """The second half of the heads is subtracted from the first (differential attention)."""

    def __init__(self) -> None:
        super().__init__(4 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        each = (half.repeat(1, 2, 1, 1) for half in self.heads(self.v, x).chunk(2, dim=1))
        first, second = torch.cat([self.attended(x, half) for half in each], -1).chunk(2, dim=2)
        return self.out((first - 0.3 * second).flatten(2))


class CopiesJoined(nn.Module):
    """Copies of two parts are joined along another axis than that of the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, 2 * SIZE), nn.Linear(4 * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.repeat(1, 1, 2, 1) for part in self.inner(x).unflatten(-1, (-1, SIZE)).chunk(2, 2))
        return self.out(torch.cat([*parts], -1).flatten(2))


class MixtureSummed(nn.Module):
    """What a layer makes for each of three kernels is scaled, by a number for each, and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(SIZE, WIDTH)
        self.scale = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))

    def scaled(self, x: Tensor) -> Tensor:
        return self.inner(x).unflatten(-1, (HEADS, SIZE)) * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.scaled(x).sum(-2).relu())


class MixtureOfInside(MixtureSummed):
    """The scales are numbers for what is inside a kernel, and the sum runs over that."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 1.5]))
        self.out = nn.Linear(HEADS, WIDTH)

    def scaled(self, x: Tensor) -> Tensor:
        return (self.inner(x).unflatten(-1, (HEADS, SIZE)) * self.scale).transpose(-1, -2)


class MixtureLaidOut(MixtureSummed):
    """What was scaled is laid out side by side: whole kernels can go."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.scaled(x).flatten(-2).relu())


ONE_HEAD = 3 * SIZE
HEAD_CONSTRUCTS: tuple[Construct, ...] = (
    Construct(NoLocalHeads, sequences(), removed=ONE_HEAD),
    Construct(MaskRepeated, _with_mask, removed=ONE_HEAD),
    Construct(MaskRepeatedByShape, _with_mask, removed=ONE_HEAD),
    Construct(MaskTiled, _with_mask, removed=ONE_HEAD),
    Construct(MaskInterleaved, _with_mask, removed=ONE_HEAD),
    Construct(MaskInterleavedByNumber, _with_mask, removed=ONE_HEAD),
    Construct(MaskInBatch, _with_mask, removed=ONE_HEAD),
    Construct(SharedPlaces, sequences(), removed=ONE_HEAD, reason="values that have none"),
    Construct(TokensChosen, _with_places, removed=4),
    Construct(HeadsMixed, sequences(), removed=4),
    Construct(RotaryAsWideAsTable, sequences(), removed=ONE_HEAD),
    Construct(RotaryAsWideAsHalfTable, sequences(), removed=ONE_HEAD),
    Construct(RotaryPairs, sequences(), removed=ONE_HEAD),
    Construct(StateOfZeros, sequences(), removed=ONE_HEAD),
    Construct(SystemInHeads, sequences(), removed=2 * SIZE),
    Construct(SystemFromTheRight, sequences(), removed=2 * SIZE),
    Construct(SharedSystem, sequences(), removed=4),
    Construct(LatentHeads, sequences(), removed=ONE_HEAD + 2),
    Construct(LatentHeadsUnsqueezed, sequences(), removed=ONE_HEAD + 2),
    Construct(QueriesPastOneHead, sequences(), removed=SIZE),
    Construct(GatesForGroups, sequences(), removed=24),
    Construct(GatesForGroupsByShape, sequences(), removed=24),
    Construct(ScanOfGroups, sequences(), removed=20),
    Construct(ScanOfOneGroup, sequences(), removed=8),
    Construct(ValuesRepeated, sequences(), removed=12),
    Construct(DifferenceOfHalves, sequences(), removed=12),
    Construct(CopiesJoined, sequences(), removed=4),
    Construct(MixtureSummed, sequences(), removed=2 * HEADS),
    Construct(MixtureOfInside, sequences(), removed=SIZE),
    Construct(MixtureLaidOut, sequences(), removed=SIZE),
    Construct(RepairsInTraining, sequences(), removed=8),
    Construct(RepairsAlways, sequences(), removed=4, reason="any runs over these channels"),
    Construct(SystemOfChannels, sequences(), reason="a system of equations mixes these channels"),
)
