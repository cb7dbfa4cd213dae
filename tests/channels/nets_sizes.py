"""Numbers of channels that get into the arithmetic, into new tensors, or into other axes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, conv_bn, images, sequences, vectors, words
from tests.channels.nets_refusals import Between


class DividedByWidth(Between):
    def act(self, x: Tensor) -> Tensor:
        return x / x.shape[1]


class DividedByWidthAndPixels(Between):
    """The number is another one for images of another size."""

    def act(self, x: Tensor) -> Tensor:
        return x / (x.shape[1] * x.shape[2])


class GatedByMean(Between):
    """A mean by hand: channels that are 0 add nothing to the sum, and it is still divided by all of them."""

    def act(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x.sum(1, keepdim=True).div_(x.size(1)).mul(2 * x.size(1) - 3))


class RootOfWidth(Between):
    """A tensor is made of the number of channels (DeBERTa's scale)."""

    def act(self, x: Tensor) -> Tensor:
        return x * torch.tensor(x.shape[1], dtype=torch.float).sqrt().to(x.dtype)


class RootOfElements(Between):
    """The number is another one for images of another size."""

    def act(self, x: Tensor) -> Tensor:
        return x * torch.tensor(x.shape[1] * x.shape[2], dtype=torch.float).sqrt().to(x.dtype)


class MeanRepeated(Between):
    """As many copies of a mean as there are channels."""

    def act(self, x: Tensor) -> Tensor:
        return x * x.mean(1, keepdim=True).repeat(1, x.shape[1], 1, 1)


class ArangeByWidth(Between):
    """Every channel is scaled by its number."""

    def act(self, x: Tensor) -> Tensor:
        return x * torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None, None]


class OnesOfWrittenSize(Between):
    def act(self, x: Tensor) -> Tensor:
        return x + torch.ones(8, 1, 1, dtype=x.dtype)


class NewZeros(Between):
    """Zeros of the width that is found, joined to the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.mid = conv_bn(12, 6)

    def act(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(x.shape[0], 4, *x.shape[2:])], 1)


class SqueezedPooling(nn.Module):
    """Of two channels one is left, which the squeezes must not take away."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = conv_bn(3, 2), conv_bn(2, 2), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(torch.relu(self.stem(x)))
        pooled = x.mean((2, 3), keepdim=True)
        return self.head(torch.cat([pooled.squeeze(), torch.squeeze(x.amax((2, 3), True), (1, 2, 3))], -1))


class GramRows(nn.Module):
    """The mean over one axis of a product of channels with themselves; the other axis is read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x)).flatten(2)
        return self.head(torch.bmm(x, x.transpose(1, 2)).mean(2))


class NormalisedGramRows(GramRows):
    """The same of LayerNorm over one axis, which says nothing of the other."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x)).flatten(2)
        gram = torch.bmm(x, x.transpose(1, 2))
        return self.head(F.layer_norm(gram, gram.shape[-1:])[..., 1:].sum(2))


class ComparedWithoutNeed(Between):
    """An `if` on a number of channels and inputs whose two ways give the same, so no graph checks it."""

    def act(self, x: Tensor) -> Tensor:
        return x * 1.0 if x.shape[0] * x.shape[1] == 16 else x


class FoldedIntoBatch(Between):
    """One filter for all channels, by way of the batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.blur = nn.Conv2d(1, 1, 3, padding=1)

    def act(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return self.blur(x.reshape(b * c, 1, h, w)).view(b, c, h, w)


class SingleChannelGate(Between):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(8, 1, 1)

    def act(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x))


class SpreadGate(SingleChannelGate):
    """The gate is given the shape of what it gates, all its channels alike, before they meet."""

    def act(self, x: Tensor) -> Tensor:
        values, gate = torch.broadcast_tensors(x, self.gate(x))
        return values * torch.sigmoid(gate)


class FirstChannelExpanded(Between):
    def act(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x[:, :1].expand(-1, 8, -1, -1))


class Maxout(nn.Module):
    """The larger one of every two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 16), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x.view(x.shape[0], 8, 2, *x.shape[2:]).amax(2))


class GroupMeans(nn.Module):
    """The mean of every four channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = conv_bn(3, 16), conv_bn(4, 6), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(F.relu(self.mid(x.view(x.shape[0], 4, 4, *x.shape[2:]).mean(2))))


class SpatialStride(Between):
    def act(self, x: Tensor) -> Tensor:
        return x[..., ::2, 1::2] + x[:, :, 1::2, :3]


class UnfoldedPatches(nn.Module):
    """Patches by strides, each with all of its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = conv_bn(3, 8), nn.Linear(8 * 4, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x)).unfold(2, 2, 2).unfold(3, 2, 2)
        return self.head(F.relu(self.mix(x.permute(0, 2, 3, 1, 4, 5).flatten(3))))


class PatchesAsRows(nn.Module):
    """A convolution written as a product of patches and a matrix (im2col)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = conv_bn(3, 8), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 5, 1)
        self.shift = nn.Parameter(torch.randn(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(F.relu(self.stem(x)), 3)
        x = self.conv.weight.flatten(1) @ patches + self.shift
        return self.head(F.relu(x.unflatten(2, (4, 4))))


class MixedPatches(nn.Module):
    """Every patch goes through a layer of its own and is added to its neighbours again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = conv_bn(3, 8), nn.Linear(8 * 4, 8 * 4), nn.Conv2d(8, 5, 1)
        self.cut, self.paste = nn.Unfold(2, stride=1), nn.Fold((6, 6), 2, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.cut(F.relu(self.stem(x))).transpose(1, 2)
        return self.head(self.paste(F.relu(self.mid(patches)).transpose(1, 2)))


class AddInPlace(Between):
    def __init__(self) -> None:
        super().__init__()
        self.branch = conv_bn(8, 8)

    def act(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        y += x
        y.mul_(0.5).relu_()
        return y


class ChannelSetToZero(Between):
    def act(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 0.5
        return x


class FilledByRows(nn.Module):
    """Time steps are written one by one into a buffer of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.step, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = torch.zeros_like(x)
        state = x[:, 0]
        for t in range(5):
            state = torch.tanh(self.step(state) + x[:, t])
            out[:, t] = state
        return self.head(out)


class UnrolledCell(nn.Module):
    """A recurrent cell in a loop, its steps stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.step, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        steps = F.relu(self.stem(x)).unbind(1)
        state = steps[0]
        states = [state := torch.tanh(self.step(state) + one) for one in steps]
        return self.head(torch.stack(states, 1))


class GatedCell(nn.Module):
    """The gates of an LSTM by hand: one layer for four, cut by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gates, self.head = nn.Linear(6, 8), nn.Linear(16, 32), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        h = c = torch.zeros_like(x[:, 0])
        for t in range(3):
            i, f, g, o = self.gates(torch.cat([x[:, t], h], -1)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.head(h)


class CosineOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.cosine_similarity(self.left(x), self.right(x), dim=-1))


class HeadsInBatch(nn.Module):
    """Heads, counted by a shape, go into the batch for a pooling and come out of it again (MViT)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool, self.head = nn.Linear(6, 16), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.stem(x).unflatten(-1, (4, 4)).transpose(1, 2)
        batch, count, tokens, size = heads.shape
        pooled = self.pool(heads.reshape(batch * count, tokens, size).transpose(1, 2)).transpose(1, 2)
        joined = pooled.reshape(batch, count, tokens, -1).transpose(1, 2)
        return self.head(joined.reshape(batch, tokens, count * size))


class HeadsInBatchBesideTheirClass(nn.Module):
    """The same, but for a first token, which is joined with the others after the pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 5)
        self.pool = nn.Conv1d(4, 4, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.stem(x).unflatten(-1, (4, 4)).transpose(1, 2)
        first, others = heads[:, :, :1], heads[:, :, 1:]
        batch, count, tokens, size = others.shape
        pooled = self.pool(others.reshape(batch * count, tokens, size).transpose(1, 2)).transpose(1, 2)
        joined = torch.cat((first, pooled.reshape(batch, count, tokens, size)), 2).transpose(1, 2)
        return self.head(joined.flatten(2))


class MeanOfHeads(nn.Module):
    """The weights of all heads are averaged: the number of heads matters."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k = (layer(x).view(b, t, 2, 4).transpose(1, 2) for layer in (self.q, self.k))
        weight = (q @ k.transpose(-2, -1) * 0.5).softmax(-1).mean(1)
        return self.out(weight @ self.v(x))


class TalkingHeads(nn.Module):
    """A layer mixes the heads' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 5)
        self.talk = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, 2, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        score = self.talk((q @ k.transpose(-2, -1) * 0.5).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out((score.softmax(-1) @ v).transpose(1, 2).flatten(2))


class PaddedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = (
            nn.Embedding(11, 8, padding_idx=0),
            nn.Linear(8, 6),
            nn.Linear(6, 5),
        )

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words) * (words != 0).unsqueeze(-1)
        return self.head(F.relu(self.hidden(x.sum(1))))


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.hidden, self.head = nn.EmbeddingBag(11, 8), nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.bag(words))))


class PooledAcrossChannels(nn.Module):
    """Pooling runs along the features of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(6, 8), nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mid(F.avg_pool1d(F.relu(self.stem(x)), 2))))


class DeadBranch(Between):
    """A branch whose result nobody reads, with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = conv_bn(8, 8)

    def act(self, x: Tensor) -> Tensor:
        self.unused(x)
        return x


class UnusedLayer(Between):
    """A layer that forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Conv2d(8, 8, 3)


class LogProbabilities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.head(F.relu(self.stem(x)))
        return {"log": F.log_softmax(logits, -1), "best": logits.argmax(-1)}


class PlacesOfItsOwn(nn.Module):
    """An input that is not given, and the buffer of its name that takes its place."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.table, self.head = nn.Linear(6, 8), nn.Embedding(9, 8), nn.Linear(8, 5)
        self.register_buffer("places", torch.arange(9))

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        if places is None:
            places = self.places[None, : x.shape[1]]
        return self.head(F.relu(self.stem(x) + self.table(places)))


class HalvesByConstant(nn.Module):
    """Where the halves part is a number in a tensor, as TorchScript wants it (WaveGlow, VITS)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(8, 5)

    def place(self) -> Tensor:
        return torch.IntTensor([8])[0]

    def forward(self, x: Tensor) -> Tensor:
        x, place = self.stem(x), self.place()
        return self.head(torch.tanh(x[..., :place]) * torch.sigmoid(x[..., place:]))


class HalvesByBuffer(HalvesByConstant):
    """A checkpoint may bring another number."""

    width: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("width", torch.tensor(8))

    def place(self) -> Tensor:
        return self.width


class DividedByWeights(nn.Module):
    """Divides by how many weights there are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.inner(x))) / sum(p.numel() for p in self.parameters())


class ScaledByRowsOfWeight(DividedByWeights):
    """Asks a weight and a bias how wide a layer is."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.inner(x)) / self.inner.weight.shape[0]
        return self.out(x) * self.inner.bias.numel() ** 0.5


class TwoHeads(nn.Module):
    """A mean and a deviation for each hidden number, as in a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.deviation = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.last, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.act(self.mean(x), F.softplus(self.deviation(x)))

    def act(self, mean: Tensor, deviation: Tensor) -> Tensor:
        """What is made of the two."""
        raise NotImplementedError


class DrawsInTraining(TwoHeads):
    """Eval mode uses the mean only, but the distribution still wants two tensors of one size."""

    def act(self, mean: Tensor, deviation: Tensor) -> Tensor:
        normal = torch.distributions.Normal(mean, deviation)
        return self.last(normal.rsample() if self.training else normal.mean)


class DrawsElsewhere(TwoHeads):
    """The distribution is there in training only."""

    def act(self, mean: Tensor, deviation: Tensor) -> Tensor:
        drawn = mean
        if self.training:
            drawn = torch.distributions.Normal(mean, deviation).rsample()
        return self.last(drawn)


class BroadTogether(TwoHeads):
    def act(self, mean: Tensor, deviation: Tensor) -> Tensor:
        mean, deviation = torch.broadcast_tensors(mean, deviation * 0.05)
        return self.last(mean) + self.other(deviation)


class SpansGrid(TwoHeads):
    """The sizes of a grid are those of both of its sides."""

    def act(self, mean: Tensor, deviation: Tensor) -> Tensor:
        across, along = torch.meshgrid(mean[0], deviation[0], indexing="ij")
        return self.last(across.T) + self.other(along)


class NewOfSize(Between):
    """Memory as large as another tensor, by the old way of asking for it."""

    def act(self, x: Tensor) -> Tensor:
        return x * x.new(x.size()).fill_(0.5)


SIZES = (
    Construct(DividedByWeights, vectors(), removed=4),
    Construct(ScaledByRowsOfWeight, vectors(), removed=4),
    Construct(DividedByWidth, images(), removed=7),
    Construct(DividedByWidthAndPixels, images(), removed=7),
    Construct(GatedByMean, images(), removed=7),
    Construct(RootOfWidth, images(), removed=7),
    Construct(RootOfElements, images(), removed=7),
    Construct(MeanRepeated, images(), removed=3, reason="these channels"),
    Construct(ArangeByWidth, images(), removed=3, reason="these channels"),
    Construct(OnesOfWrittenSize, images(), removed=7),
    Construct(NewZeros, images(), removed=7),
    Construct(SqueezedPooling, images(), removed=2),
    Construct(GramRows, images(), removed=4),
    Construct(NormalisedGramRows, images(), removed=4),
    Construct(ComparedWithoutNeed, images(), removed=7),
    Construct(FoldedIntoBatch, images(), removed=3),
    Construct(SingleChannelGate, images(), removed=7),
    Construct(SpreadGate, images(), removed=7),
    Construct(FirstChannelExpanded, images(), removed=3),
    Construct(Maxout, images(), removed=8),
    Construct(GroupMeans, images(), removed=3),
    Construct(SpatialStride, images(), removed=7),
    Construct(UnfoldedPatches, images(), removed=7),
    Construct(PatchesAsRows, images(), removed=7),
    Construct(MixedPatches, images(), removed=20),
    Construct(AddInPlace, images(), removed=11),
    Construct(ChannelSetToZero, images(), removed=3),
    Construct(FilledByRows, sequences(), removed=8),
    Construct(UnrolledCell, sequences(), removed=8),
    Construct(GatedCell, sequences(), removed=20),
    Construct(CosineOfTwo, sequences(), removed=8),
    Construct(HeadsInBatch, sequences(), removed=8),
    Construct(HeadsInBatchBesideTheirClass, sequences(), removed=2),
    Construct(MeanOfHeads, sequences(), removed=4),
    Construct(TalkingHeads, sequences(), removed=12),
    Construct(PaddedEmbedding, words(), removed=7),
    Construct(BagOfWords, words(), removed=3),
    Construct(PooledAcrossChannels, sequences(), removed=3, reason="sweeps over these channels"),
    Construct(DeadBranch, images(), removed=7),
    Construct(UnusedLayer, images(), removed=7),
    Construct(LogProbabilities, sequences(), removed=4),
    Construct(PlacesOfItsOwn, sequences(), removed=8),
    Construct(HalvesByConstant, sequences(), removed=8),
    Construct(HalvesByBuffer, sequences(), reason="is told sizes or positions"),
    Construct(DrawsInTraining, vectors(), removed=8 + 4 + 4),
    Construct(DrawsElsewhere, vectors(), removed=8 + 4),
    Construct(BroadTogether, vectors(), removed=8 + 4 + 4),
    Construct(SpansGrid, vectors(), removed=8, reason="span a grid"),
    Construct(NewOfSize, images(), removed=4 + 3),
)
