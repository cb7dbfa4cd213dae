"""Operations that run along one axis and leave the channels along the others to themselves."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, sequences


class AlongTime(nn.Module):
    """Something happens along the tokens, (batch, tokens, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def along(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.along(self.stem(x)))


class RunningSums(AlongTime):
    def along(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None] + x.cummax(1)[0]


class RunningLogSums(AlongTime):
    """None of them is 0 where a channel is."""

    def along(self, x: Tensor) -> Tensor:
        return torch.logcumsumexp(x, 1) + x.logsumexp(1, keepdim=True)


class LargestTokens(AlongTime):
    """The largest values of every channel, in the order of the tokens."""

    def along(self, x: Tensor) -> Tensor:
        places = x.topk(3, dim=1)[1].sort(dim=1)[0]
        return x.gather(1, places) + x.sort(dim=1, descending=True)[0][:, :3] + x.median(1, keepdim=True)[0]


class GlobalFilter(AlongTime):
    """Tokens are mixed by a filter of their spectrum (GFNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, 8, 2))

    def along(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter)
        return torch.fft.irfft(spectrum, n=x.shape[1], dim=1)


class RotaryByComplex(AlongTime):
    """Pairs of channels are rotated as complex numbers; within a head all stay (LLaMA)."""

    def along(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:2], 2, -1, 2))
        angle = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), torch.tensor([1.0, 0.1], dtype=x.dtype))
        turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.view_as_real(turned).flatten(2)


class AmplitudeAndPhase(AlongTime):
    def along(self, x: Tensor) -> Tensor:
        number = torch.complex(x, x.relu())
        return (number * number.conj()).real + number.imag * number.abs()


class OtherFormsOfSlices(AlongTime):
    """Quantiles, spreads, quarter turns, choices, axes that are changed in place, noisy and smooth steps."""

    def along(self, x: Tensor) -> Tensor:
        x = F.logsigmoid(x) + F.rrelu(torch.rot90(x[:, :, None], 2, (1, 2)).squeeze_(2))
        x = x - x.quantile(0.3, dim=1, keepdim=True) / (1 + torch.std_mean(x, 1, keepdim=True)[0])
        places = x.argsort(1)[:, :3]
        return torch.take_along_dim(x, places, 1).ravel().view(len(x), 3, -1).clone().transpose_(1, 2).mT


class CodebookByDistance(AlongTime):
    """Each token becomes the nearest entry of a codebook (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(7, 8))

    def along(self, x: Tensor) -> Tensor:
        chosen = F.embedding(torch.cdist(x, self.codes).argmin(-1), self.codes)
        return x + (chosen - x).detach()


class ScoredByVector(nn.Module):
    """A vector gives each example a score (matrix times vector)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.vector = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).mean(1)
        return self.head(x) * torch.tanh(x @ self.vector)[:, None]


class FirstByKeyword(nn.Module):
    """Functions that move channels are given what they move by its keyword."""

    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.register_buffer("order", torch.tensor([1, 0, 3, 2, 5, 4, 7, 6]))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.roll(input=self.stem(x), shifts=1, dims=-1)
        x = torch.index_select(input=x, dim=2, index=self.order)
        x = torch.unflatten(input=x, dim=2, sizes=(2, 4)).flatten(2)
        first, last = torch.split(tensor=x, split_size_or_sections=4, dim=2)
        x = torch.cat(tensors=(last, F.pad(input=first, pad=(0, 4))[..., :4]), dim=2)
        copies = torch.tile(input=x[..., :1], dims=(1, 1, 8))
        twice = torch.repeat_interleave(input=x[..., :1], repeats=8, dim=2)
        return self.head(x * copies.sigmoid() * twice.sigmoid())


SLICES = (
    Construct(FirstByKeyword, sequences(), removed=4),
    Construct(RunningSums, sequences(), removed=4),
    Construct(RunningLogSums, sequences(), removed=4),
    Construct(LargestTokens, sequences(), removed=4),
    Construct(GlobalFilter, sequences(), removed=4),
    Construct(RotaryByComplex, sequences(), removed=4),
    Construct(AmplitudeAndPhase, sequences(), removed=4),
    Construct(OtherFormsOfSlices, sequences(), removed=4),
    Construct(CodebookByDistance, sequences(), removed=4),
    Construct(ScoredByVector, sequences(), removed=4),
)
