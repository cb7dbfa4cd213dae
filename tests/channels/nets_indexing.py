"""Places chosen by index tensors along an axis that has no channels, or that has."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, Inputs, sequences


class Messages(nn.Module):
    """Messages along the edges of a graph are added up at its nodes."""

    sources: Tensor
    targets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.message = nn.Linear(6, 8), nn.Linear(16, 8)
        self.mid, self.head = nn.Linear(8, 6), nn.Linear(6, 5)
        self.register_buffer("sources", torch.tensor([0, 1, 2, 3, 4, 0]))
        self.register_buffer("targets", torch.tensor([1, 2, 3, 4, 0, 3]))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        told = F.relu(self.message(torch.cat([x[:, self.sources], x[:, self.targets]], -1)))
        return self.head(F.relu(self.mid(x + self.summed(x, told))))

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(1, self.targets, told)


class SomeForgotten(Messages):
    """Some nodes are told nothing, or the same number in all channels."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        total = super().summed(x, told).index_fill(1, self.targets[:2], 0.0)
        return total + x.index_fill(1, self.targets[2:3], 0.5)


class ForgottenChannels(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return x.index_fill(2, self.targets[:2], 0.0)


class Spread(Messages):
    """How far messages lie apart, and their mean where they are numbers."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        least, most = torch.aminmax(told.detach(), dim=1, keepdim=True)
        return (most - least) * told.nanmean(1, keepdim=True) + x.nansum(-1, keepdim=True)


class UnsafelySplit(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        first, second = torch.unsafe_split(told, 4, -1)
        third, fourth = told.unsafe_split_with_sizes([2, 4], 1)
        return torch.cat([second, first], -1)[:, 1:] + torch.cat([fourth, third], 1)[:, 1:]


class MessagesInPlace(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add_(1, self.targets, told, alpha=0.5)


class MessagesScattered(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        index = self.targets.view(1, -1, 1).expand(told.shape)
        return torch.zeros_like(x).scatter_add(1, index, told)


class MessagesOfWrittenSize(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        index = self.targets.view(1, -1, 1).expand(told.shape[0], 6, 8)
        return x.new_zeros(x.shape[0], 5, 8).scatter_add(1, index, told)


class LargestMessage(Messages):
    """What meets at one token is reduced."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        index = self.targets.view(1, -1, 1).expand(told.shape)
        largest = torch.zeros_like(x).scatter_reduce(1, index, told, "amax")
        return largest + torch.zeros_like(x).scatter_reduce(1, index, told, "mean", include_self=False)


class LastMessage(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        index = self.targets[:5].view(1, -1, 1).expand(x.shape)
        copied = x.index_copy(1, self.targets[:1], told[:, :1])
        return copied + torch.zeros_like(x).scatter(1, index, told[:, :5])


class NumbersScattered(Messages):
    """What is written is a number, which does not vanish with any channel."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return told[:, :5].scatter(
            1, self.targets[:1].view(1, 1, 1).expand(x.shape[0], 1, told.shape[2]), 2.0
        )


class TokensReplaced(Messages):
    """The first tokens are replaced by others, and one by the last."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return torch.select_scatter(torch.slice_scatter(x, told[:, :2], 1, 0, 2), told[:, -1], 1, 3)


class ChannelsReplaced(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return torch.slice_scatter(x, told[:, :5, :4], -1, 2, 6)


class FeaturesAmongWords(Messages):
    """Features take the places of some words, as those of images in language models."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        mask = (torch.arange(x.shape[1]) % 2 == 0).view(1, -1, 1).expand_as(x)
        features = told[:, :3].reshape(-1, told.shape[-1])
        return x.masked_scatter(mask, features) + x.masked_scatter(mask[..., :1], features)


class NegativesReplaced(Messages):
    """A mask of the channels' own values takes as many numbers as it happens to."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return x.masked_scatter(x < 0, told)


class LookedUp(Messages):
    """Steps of a quantised gate."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.linspace(-1, 1, 5, dtype=torch.float64))

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        told = told[:, :5]
        gate = torch.bucketize(x, self.steps) + torch.searchsorted(self.steps, x.contiguous(), right=True)
        return told * gate * torch.isin(gate, torch.tensor([0, 2, 4, 6]))


class CausalScores(Messages):
    """Linear attention, whose scores are cut to a triangle."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        told = told[:, :5]
        return (told @ told.transpose(1, 2)).tril() @ x


class TriangleOfChannels(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return x.triu(1)


class LimitedNorms(Messages):
    """Of every channel over all tokens, and of every token over all channels."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return x.renorm(2, 2, 1.0) + told[:, :5].renorm(2, 1, 1.0)


class PickedByList(Messages):
    """One channel, picked by a list or by a step, gates the others."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return x * x[..., [5]] * told[:, :5, 2::8]


class Selected(Messages):
    """One channel, counted from either end, gates the others, and so does one token."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        gates = x.select(2, 5) * torch.select(x, -1, index=-3)
        return x * gates.unsqueeze(-1) * told.select(1, told.size(1) - 2).unsqueeze(1)


class PickedOfBroadcast(Messages):
    """What is picked holds for all channels, for it was broadcast along them."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        scales = x.new_full((1, 1, 1), 2.0).expand_as(x)
        return x * scales[..., :1] + told[:, :5] * scales[..., 3:4]


class BestToken(Messages):
    """The token with the largest sum, by an index without channels."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        best = told.detach().sum(-1, keepdim=True).argmax(1, keepdim=True)
        return told.gather(1, best.expand(-1, -1, told.shape[-1]))


class BestOfEachChannel(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return told.gather(1, told.argmax(1, keepdim=True))


class GatheredAlongChannels(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        order = torch.arange(7, -1, -1).view(1, 1, -1)
        return x.gather(2, order.expand(x.shape))


class PointsOfImages(Messages):
    """Points are picked by their numbers and by those of their images, side by side or not."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        images = torch.arange(len(x))[:, None]
        nearest = torch.cdist(x.detach(), x.detach()).topk(3, -1, largest=False)[1]
        near = told[images[..., None], nearest, :].amax(2) + x[images.flatten(), nearest[:, 0, 0]][:, None]
        return near + told[..., None, :].transpose(0, 1)[nearest[0, 0], images].sum((0, 1, 2))


class PointsOfChannels(Messages):
    """Half of the channels of points that are picked."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        images, points = torch.arange(len(x))[:, None], self.sources[:5]
        return torch.cat([x[images, points, :4], x[images, points, 4:]], -1)


class WrittenToImages(Messages):
    """Features are laid on a grid by numbers of images, rows and columns, side by side or not."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        images = torch.arange(len(x)).repeat_interleave(5)
        rows, columns = self.sources[:5].repeat(len(x)), self.targets[:5].repeat(len(x))
        apart = x.new_zeros(len(x), 8, 5, 5)
        apart[images, :, rows, columns] = x.flatten(0, 1)
        beside = x.new_zeros(len(x), 5, 5, 8)
        places = images[:, None], rows[:, None], torch.stack([columns, rows], 1)
        beside[places] = told[:, :5].reshape(-1, 1, 8)
        return apart.amax(3).transpose(1, 2) + beside.amax(1) + x


class WrittenToChannels(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        y = x.clone()
        y[:, self.sources[:5], self.targets[:5]] = 1.0
        return y


class Experts(nn.Module):
    """Experts write to the tokens that are theirs; ``largest`` is the last expert that gets any."""

    largest = 1

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[..., 0] > 0).long().clamp(max=self.largest)
        x = self.stem(x)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            y[mine] = torch.relu(expert(x[mine]))
        return self.head(x + y)


class IdleExpert(Experts):
    """With no token at all nothing can be said about an expert's channels."""

    largest = 0


class WrittenByIndex(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, self.targets[:2].view(1, 2)] = told[:, :2].unsqueeze(1)
        return y


class WrittenAcrossChannels(Messages):
    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        y = x.clone()
        y[..., torch.tensor([1, 3])] = told[:, :5, :2]
        return y


class NegativesSetToZero(Messages):
    """A mask of the channels' own values, written in place."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        y = x - 1
        y[y < 0] = 0
        return y


class RowsSetToZero(Messages):
    """A mask of whole rows, and numbers in the place of others."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        y = x * 1.0
        y[super().summed(x, told).sum(-1) > 0.2] = 0
        y[:, [0, 2]] = 0.3
        y[:, self.targets[:1]] = 0
        return y


class SomeSetToNumber(Messages):
    """A number is written wherever a tensor of as many channels is small."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        y = x * 1.0
        y[super().summed(x, told) < 0.2] = 0.2
        return y


class RowsSetByLength(Messages):
    """What is written is 0 only for sequences as long as that of the example."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        number = torch.tensor(float(x.shape[1] - 5), dtype=x.dtype)
        y, z = x * 1.0, x * 1.0
        y[x.sum(-1) > 0.2] = number
        z[:, [0, 2]] = number
        return y + z


class FilledByLength(Messages):
    """A tensor is full of a number that is 0 only for sequences as long as that of the example."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        return torch.full((8,), float(x.shape[1] - 5), dtype=x.dtype)


class PartsOfRowsSet(Messages):
    """Of the rows of a mask only some channels are written to."""

    def summed(self, x: Tensor, told: Tensor) -> Tensor:
        y = x * 1.0
        y[x[..., 0] > 0, :3] = 0
        return y


def graphs(batch: int) -> Inputs:
    """Nodes (batch + 3, 6), and the two ends of edges between them (2, 12), of which some are loops."""
    edges = torch.randint(0, batch + 3, (2, 12))
    edges[1, :3] = edges[0, :3]
    return torch.randn(batch + 3, 6, dtype=torch.float64), edges


class Convolution(nn.Module):
    """A graph convolution that gives each node one loop: how many there were depends on the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        edges = edges[:, edges[0] != edges[1]]
        loops = torch.arange(x.size(0)).expand(2, -1)
        weight = torch.cat([x.new_ones(edges.size(1)), x.new_full((x.size(0),), 0.5)])
        ends = torch.cat([edges, loops], 1)
        told = self.conv(F.relu(self.stem(x)))[ends[0]] * weight[:, None]
        added = x.new_zeros(x.size(0), told.size(1)).index_add_(0, ends[1], told)
        return self.head(F.relu(added))


class HeadsOfMessages(nn.Module):
    """Attention of a node to those with an edge to it, in two heads that are set to 0 before."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        edges = edges[:, edges[0] != edges[1]]
        query, key, value = (layer(x).view(-1, 2, 4) for layer in (self.query, self.key, self.value))
        score = (query[edges[1]] * key[edges[0]]).sum(-1).sigmoid()
        told = value[edges[0]] * score.unsqueeze(-1)
        index = edges[1].view(-1, 1, 1).expand_as(told)
        return self.head(told.new_zeros(x.size(0), 2, 4).scatter_add(0, index, told).flatten(1))


class FoundScores(nn.Module):
    """A detector's last step: of two classes, the scores above a limit, which none of the example's is."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(F.relu(self.stem(x))).flatten(0, 1)
        found = [scores[torch.where(column > 1e6)[0]].sum(1) for column in scores.unbind(1)]
        return scores.sum(0) + torch.cat(found).sum()


class ChannelsByNumPy(nn.Module):
    """Arrays of NumPy say which tokens, and which channels, go on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(4, 6)
        self.tokens, self.channels = np.array([3, 1]), np.array([5, 0, 3, 6])

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x)[:, self.tokens][..., self.channels].relu())


class OneNumber(nn.Module):
    """A tensor of one number, instead of a number, says which token, which channel and from where on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.mid(x[:, torch.tensor(2), ::2].repeat(1, 2) + x.narrow(1, torch.tensor(1), 1)[:, 0])
        return self.head(x * x[:, torch.tensor(3), None].sigmoid())


class OneNumberOfTokens(OneNumber):
    """It says which token only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.stem(x)[:, torch.tensor(2)]))


INDEXING = (
    Construct(OneNumber, sequences(), reason="sizes or positions"),
    Construct(OneNumberOfTokens, sequences(), removed=8),
    Construct(Messages, sequences(), removed=11),
    Construct(MessagesInPlace, sequences(), removed=11),
    Construct(MessagesScattered, sequences(), removed=11),
    Construct(MessagesOfWrittenSize, sequences(), removed=11),
    Construct(LargestMessage, sequences(), removed=11),
    Construct(LastMessage, sequences(), removed=11),
    Construct(NumbersScattered, sequences(), removed=11),
    Construct(TokensReplaced, sequences(), removed=11),
    Construct(ChannelsReplaced, sequences(), removed=3, reason="chosen by an index"),
    Construct(FeaturesAmongWords, sequences(), removed=11),
    Construct(NegativesReplaced, sequences(), removed=3, reason="chosen by an index"),
    Construct(LookedUp, sequences(), removed=11),
    Construct(CausalScores, sequences(), removed=11),
    Construct(TriangleOfChannels, sequences(), removed=3, reason="one half is 0"),
    Construct(LimitedNorms, sequences(), removed=3, reason="takes a norm over these channels"),
    Construct(PickedByList, sequences(), removed=3, reason="picked by its number"),
    Construct(Selected, sequences(), removed=3, reason="picked by its number"),
    Construct(PickedOfBroadcast, sequences(), removed=11),
    Construct(BestToken, sequences(), removed=11),
    Construct(BestOfEachChannel, sequences(), removed=11),
    Construct(GatheredAlongChannels, sequences(), removed=3, reason="chosen by an index"),
    Construct(SomeForgotten, sequences(), removed=11),
    Construct(ForgottenChannels, sequences(), removed=3, reason="chosen by an index"),
    Construct(Spread, sequences(), removed=11),
    Construct(UnsafelySplit, sequences(), removed=11),
    Construct(PointsOfImages, sequences(), removed=11),
    Construct(PointsOfChannels, sequences(), removed=3, reason="told sizes or positions"),
    Construct(WrittenToImages, sequences(), removed=11),
    Construct(WrittenToChannels, sequences(), removed=3, reason="chosen by an index"),
    Construct(Experts, sequences(), removed=12),
    Construct(IdleExpert, sequences(), reason="nothing of these channels is left"),
    Construct(WrittenByIndex, sequences(), removed=11),
    Construct(WrittenAcrossChannels, sequences(), removed=3, reason="chosen by an index"),
    Construct(NegativesSetToZero, sequences(), removed=7),
    Construct(RowsSetToZero, sequences(), removed=11),
    Construct(SomeSetToNumber, sequences(), removed=11),
    Construct(RowsSetByLength, sequences(), removed=7),
    Construct(FilledByLength, sequences(), removed=7),
    Construct(PartsOfRowsSet, sequences(), removed=3, reason="told sizes or positions"),
    Construct(Convolution, graphs, removed=7),
    Construct(HeadsOfMessages, graphs, removed=12),
    Construct(FoundScores, sequences(), removed=4),
    Construct(ChannelsByNumPy, sequences(), removed=2),
)
