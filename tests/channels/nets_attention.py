"""Attention in the ways in which people write it, and gated hidden layers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, images, pairs, sequences

HEADS, SIZE, WIDTH = 2, 4, 6
"""Heads, channels of a head, and the width of the stream, which is the input's and stays."""


class QkvHardCoded(nn.Module):
    """Numbers of heads and channels are written into every view."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weight = (q @ k.transpose(-2, -1) * SIZE**-0.5).softmax(-1)
        return x + self.out((weight @ v).transpose(1, 2).reshape(b, t, HEADS * SIZE))


class QkvFreeHeads(QkvHardCoded):
    """The channels of a head follow by themselves."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weight = (q @ k.transpose(-2, -1) * 0.4).softmax(-1)
        return x + self.out((weight @ v).transpose(1, 2).flatten(2))


class QkvFreeSize(QkvHardCoded):
    """The number of heads follows by itself."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weight = (q @ k.transpose(-2, -1) * 0.4).softmax(-1)
        return x + self.out((weight @ v).transpose(1, 2).flatten(2))


class RowsOfHeads(QkvHardCoded):
    """The output layer reads rows, viewed with the size that heads have together, as in GPT-2's Conv1D."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weight = (q @ k.transpose(-2, -1) * 0.4).softmax(-1)
        heads = (weight @ v).transpose(1, 2).flatten(2)
        rows = torch.addmm(self.out.bias, heads.view(-1, heads.size(-1)), self.out.weight.T)
        return x + rows.view(*heads.shape[:-1], -1)


class DefaultScale(QkvHardCoded):
    """The fused function divides by the root of the size that it finds."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class FusedInWindows(QkvHardCoded):
    """Tensors of five axes, for which torch has no fused kernel; a mask may leave a row without a value."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            layer(x).view(b, t // 3, 3, HEADS, SIZE).transpose(2, 3) for layer in (self.q, self.k, self.v)
        )
        mask = torch.ones(3, 3, dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4)
        return x + self.out(y.transpose(2, 3).reshape(b, t, -1))


class SingleHeadFused(QkvHardCoded):
    """Where fewer values than queries are left, torch breaks attention up (diffusers)."""

    scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unsqueeze(1) for layer in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, scale=self.scale).squeeze(1))


class SingleHeadScaled(SingleHeadFused):
    """The scale is given, so the dimensions that q and k share may go, too."""

    scale = 0.4


class ScaleFromShape(QkvHardCoded):
    """The scale is computed from the size of q."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weight = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).softmax(-1)
        return x + self.out((weight @ v).transpose(1, 2).flatten(2))


class Causal(QkvHardCoded):
    """A triangular mask in a buffer, as GPT-2 has it."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(9, 9).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        score = (q @ k.transpose(-2, -1) * 0.5).masked_fill(~self.mask[:t, :t], float("-inf"))
        return x + self.out((score.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class SingleHead(QkvHardCoded):
    def forward(self, x: Tensor) -> Tensor:
        weight = (self.q(x) @ self.k(x).transpose(1, 2) * 0.4).softmax(-1)
        return x + self.out(weight @ self.v(x))


class BatchedHeads(QkvHardCoded):
    """Heads are folded into the batch (torch.bmm)."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            layer(x).view(b, t, HEADS, SIZE).transpose(1, 2).reshape(b * HEADS, t, SIZE)
            for layer in (self.q, self.k, self.v)
        )
        y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return x + self.out(y.view(b, HEADS, t, SIZE).transpose(1, 2).reshape(b, t, -1))


class HeadsOutOfTheBatch(nn.Module):
    """The batch comes out of a division by the written number of heads, which have one channel each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 4) for _ in range(3))
        self.out = nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            layer(x).view(b, t, 4, 1).transpose(1, 2).reshape(b * 4, t, 1)
            for layer in (self.q, self.k, self.v)
        )
        y = (q @ k.transpose(1, 2)).softmax(-1) @ v
        y = y.reshape(y.shape[0] // 4, 4, y.shape[1], y.shape[2]).transpose(1, 2)
        return x + self.out(y.reshape(y.shape[0], y.shape[1], 4))


class WideValues(nn.Module):
    """One head whose values are wider than its queries, with the scale that torch works out (iFormer)."""

    scale: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.v, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unsqueeze(1) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, scale=self.scale).squeeze(1))


class WideValuesScaled(WideValues):
    """The same with a scale of its own, which no number of channels changes."""

    scale = 0.4


class OperationItself(QkvHardCoded):
    """The operation is called past torch.nn.functional, and its scale is left to it (exported graphs)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unsqueeze(1) for layer in (self.q, self.k, self.v))
        y = torch.ops.aten.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.squeeze(1))


class ScaleFromWidth(nn.Module):
    """The scale comes from the width of the stream, which may go with the norm that runs over it (Swin)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(WIDTH, HEADS * SIZE), nn.LayerNorm(HEADS * SIZE)
        self.qkv, self.out = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, HEADS * SIZE)
        self.head = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.embed(x)
        y = self.norm(stream)
        b, t, width = y.shape
        q, k, v = self.qkv(y).reshape(b, t, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        q = q * (width // HEADS) ** -0.5
        y = (q.matmul(k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(b, t, width)
        return self.head(stream + self.out(y))


class PositionsForEachExample(nn.Module):
    """Heads are a part of the batch, and keys of positions are repeated for each example (DeBERTa)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.places, self.out = nn.Embedding(5, WIDTH), nn.Linear(HEADS * SIZE, 3)

    def heads(self, x: Tensor) -> Tensor:
        parts = x.view(*x.shape[:-1], HEADS, -1).transpose(1, 2)
        return parts.contiguous().view(-1, x.size(1), parts.size(-1))

    def scale(self, q: Tensor) -> Tensor:
        return torch.sqrt(torch.tensor(q.size(-1), dtype=torch.float)).to(q.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        places = self.heads(self.k(self.places.weight[None])).repeat(q.size(0) // HEADS, 1, 1)
        weight = (torch.bmm(q, (k + places).transpose(1, 2)) / self.scale(q)).softmax(-1)
        y = torch.bmm(weight, v).view(-1, HEADS, x.size(1), v.size(-1)).transpose(1, 2)
        return self.out(y.reshape(*x.shape[:2], -1))


class ScaleAsTensor(PositionsForEachExample):
    """The width of a head is made a tensor of the dtype of the products (temporal fusion transformers)."""

    def scale(self, q: Tensor) -> Tensor:
        return torch.sqrt(torch.as_tensor(q.size(-1), dtype=q.dtype))


class ScaleInNewTensor(PositionsForEachExample):
    """It is one of the numbers of a tensor."""

    def scale(self, q: Tensor) -> Tensor:
        return q.new_tensor([q.size(-1), 1]).prod().sqrt()


class HeadsOfTheInput(nn.Module):
    """Heads are as wide as the input's width says, which the layer that reads it has, too (nanoGPT)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4 * SIZE, 12 * SIZE), nn.Linear(4 * SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.size()
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (part.view(b, t, 4, width // 4).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, width))


class PrefixAndRotated(nn.Module):
    """The first token keeps its place, the others are turned by tables that all heads share (DINOv3)."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)
        angles = torch.linspace(0, 1, 4 * SIZE, dtype=torch.float64).view(4, SIZE)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turned(self, x: Tensor) -> Tensor:
        first, rest = x[:, :, :1], x[:, :, 1:]
        crossed = torch.stack([-rest[..., 1::2], rest[..., ::2]], -1).reshape(rest.shape)
        return torch.cat([first, rest * self.cos + crossed * self.sin], 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, SIZE).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v)
        return x + self.out(y.transpose(1, 2).reshape(b, t, -1))


class PackedQkv(nn.Module):
    """One layer makes q, k and v, taken apart by reshape, permute and unbind (timm)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, scale=0.4)
        return x + self.out(y.transpose(1, 2).reshape(b, t, HEADS * SIZE))


class PackedQkvChunk(PackedQkv):
    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, SIZE).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        weight = (q @ k.transpose(-2, -1) * 0.4).softmax(-1)
        return x + self.out((weight @ v).transpose(1, 2).reshape(b, t, -1))


class PackedQkvIndexed(PackedQkv):
    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        qkv = self.qkv(x).reshape(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        weight = (qkv[0] @ qkv[1].transpose(-2, -1) * 0.4).softmax(-1)
        return x + self.out((weight @ qkv[2]).transpose(1, 2).flatten(2))


class LearnedQueries(QkvHardCoded):
    """Queries are parameters, the same for all examples, that a norm and a hidden layer have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, WIDTH))
        self.norm, self.hidden = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        asked = self.hidden(F.gelu(self.norm(self.queries.expand(x.shape[0], -1, -1))))
        q, k, v = (
            layer(given).view(*given.shape[:2], HEADS, SIZE).transpose(1, 2)
            for layer, given in ((self.q, asked), (self.k, x), (self.v, x))
        )
        weight = (q @ k.transpose(-2, -1) * SIZE**-0.5).softmax(-1)
        return self.out((weight @ v).transpose(1, 2).flatten(2))


class GroupedQuery(nn.Module):
    """Two heads of queries share one head of keys and values (Llama)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, 4 * SIZE), nn.Linear(4 * SIZE, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 2 * SIZE), nn.Linear(WIDTH, 2 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, SIZE).transpose(1, 2)
        k, v = (layer(x).view(b, t, 2, SIZE).transpose(1, 2) for layer in (self.k, self.v))
        k = k[:, :, None].expand(b, 2, 2, t, SIZE).reshape(b, 4, t, SIZE)
        v = v.repeat_interleave(2, dim=1)
        weight = (q @ k.transpose(-2, -1) * 0.4).softmax(-1)
        return x + self.out((weight @ v).transpose(1, 2).reshape(b, t, -1))


class GroupedQueryByIndex(GroupedQuery):
    """The heads of keys and values are picked by a table, out of heads and their channels in one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, SIZE).transpose(1, 2)
        k, v = (layer(x).view(b, t, 2, SIZE).transpose(1, 2) for layer in (self.k, self.v))
        heads = torch.arange(4) // 2
        weight = (q @ k[:, heads].transpose(-2, -1) * 0.4).softmax(-1)
        return x + self.out((weight @ v[:, [0, 0, 1, 1]]).transpose(1, 2).reshape(b, t, -1))


class GroupedQueryFused(GroupedQuery):
    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, SIZE).transpose(1, 2)
        k, v = (layer(x).view(b, t, 2, SIZE).transpose(1, 2) for layer in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, -1))


class RotaryPositions(QkvHardCoded):
    """The halves of a head are turned by angles from buffers."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        angle = torch.randn(9, SIZE // 2).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def turn(self, x: Tensor, t: int) -> Tensor:
        left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * self.cos[:t] + torch.cat([-right, left], -1) * self.sin[:t]

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weight = (self.turn(q, t) @ self.turn(k, t).transpose(-2, -1) * 0.4).softmax(-1)
        return x + self.out((weight @ v).transpose(1, 2).reshape(b, t, -1))


class RotaryEverywhere(RotaryPositions):
    """Of each head nothing is left before and behind what is turned, as it can be all of the head."""

    def turn(self, x: Tensor, t: int) -> Tensor:
        before, x, behind = x[..., :0], x[..., :SIZE], x[..., SIZE:]
        return torch.cat([before, super().turn(x, t), behind], -1)


class RotaryInPart(QkvHardCoded):
    """As much of a head is turned as the table of angles is wide, which is computed (Phi-3)."""

    rate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * 2 * SIZE) for _ in range(3))
        self.out = nn.Linear(HEADS * 2 * SIZE, WIDTH)
        self.register_buffer("rate", torch.rand(SIZE // 2))

    def angles(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype)
        rows = (self.rate[None, :, None] @ place[None, None, :]).transpose(1, 2)
        return torch.cat([rows, rows], dim=-1)

    def turn(self, x: Tensor, angle: Tensor) -> Tensor:
        cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
        wide = cos.shape[-1]
        turned, passed = x[..., :wide], x[..., wide:]
        left, right = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-right, left], -1) * sin, passed], -1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, 2 * SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angle = self.angles(x)
        weight = (self.turn(q, angle) @ self.turn(k, angle).transpose(-2, -1) * 0.4).softmax(-1)
        return x + self.out((weight @ v).transpose(1, 2).reshape(b, t, -1))


class RotaryOfLength(RotaryInPart):
    """The longer the sequence, the more of a head is turned; whole heads can go all the same."""

    def angles(self, x: Tensor) -> Tensor:
        return super().angles(x)[..., :1].repeat(1, 1, x.shape[1] // 2)


class RelativePositions(QkvHardCoded):
    """A table gives a bias for every head and distance (Swin)."""

    distance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, HEADS))
        place = torch.arange(5)
        self.register_buffer("distance", place[:, None] - place[None] + 4)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        bias = self.table[self.distance.view(-1)].view(5, 5, -1).permute(2, 0, 1)
        weight = (q @ k.transpose(-2, -1) * 0.5 + bias[None]).softmax(-1)
        return x + self.out((weight @ v).transpose(1, 2).reshape(b, t, -1))


class RelativePositionsInTwoAxes(RelativePositions):
    """The table is read by positions in rows and columns, and the heads lie behind both."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        bias = self.table[self.distance].permute(2, 0, 1)
        weight = (q @ k.transpose(-2, -1) * 0.5 + bias).softmax(-1)
        return x + self.out((weight @ v).transpose(1, 2).reshape(b, t, -1))


class QueryNorm(QkvHardCoded):
    """Queries and keys are brought to unit length, with a learned scale for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        score = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.scale.exp()
        return x + self.out((score.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class EinsumAttention(QkvHardCoded):
    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, SIZE) for layer in (self.q, self.k, self.v))
        weight = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return x + self.out(torch.einsum("bhqk,bkhd->bqhd", weight, v).reshape(b, t, -1))


class ConvAttention(nn.Module):
    """q, k and v come from 1x1 convolutions, positions are flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(3, 8, 1)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        q, k, v = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
        weight = (q.transpose(1, 2) @ k).softmax(-1)
        return x + self.out((v @ weight.transpose(1, 2)).view(b, -1, h, w))


class MemoryOfNoRows(nn.Module):
    """Keys and values are joined with learned ones, of which there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(6 if i < 3 else 8, 8) for i in range(4))
        self.keys, self.values = (nn.Parameter(torch.zeros(0, 8)) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = (each.expand(len(x), -1, -1) for each in (self.keys, self.values))
        given = self.q(x), torch.cat((keys, self.k(x)), 1), torch.cat((values, self.v(x)), 1)
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in given)
        attended = (q @ k.transpose(-2, -1)).relu() @ v
        return self.head(self.out(attended.transpose(1, 2).flatten(2)).relu())


class PixelsOfOneHead(nn.Module):
    """Attention of one head over the pixels that five strides have left, as in the backbones of detectors."""

    def __init__(self) -> None:
        super().__init__()
        strides = [nn.Conv2d(4 if i else 3, 4, 3, stride=2, padding=1) for i in range(5)]
        self.body, self.qkv, self.out = nn.Sequential(*strides), nn.Conv2d(4, 12, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        b, c, h, w = x.shape
        q, k, v = self.qkv(x).view(b, 1, 12, h * w).split([4, 4, 4], dim=2)
        attended = v @ (q.transpose(-2, -1) @ k).softmax(-1).transpose(-2, -1)
        return self.out((attended.view(b, c, h, w) + x).relu())


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, 8), nn.Linear(7, 16), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k, v = self.kv(memory).split(8, dim=-1)
        weight = (self.q(x) @ k.mT * 0.4).softmax(-1)
        return x + self.out(weight @ v)


class HeadsBesideHeads(QkvHardCoded):
    """Heads of attention beside heads of a dynamic convolution, along the axis of heads (ConvBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.kernel = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(HEADS * SIZE, HEADS * 3)
        self.out = nn.Linear(2 * HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        query = self.q(x)
        q, k, v = (y.view(b, t, HEADS, SIZE).transpose(1, 2) for y in (query, self.k(x), self.v(x)))
        kernel = self.kernel(query).reshape(-1, 3, 1).softmax(1)
        windows = F.unfold(self.mix(x).transpose(1, 2).unsqueeze(-1), (3, 1), padding=(1, 0))
        convolved = windows.transpose(1, 2).reshape(-1, SIZE, 3) @ kernel
        attended = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).permute(0, 2, 1, 3)
        return self.out(torch.cat([attended, convolved.view(b, t, HEADS, SIZE)], 2).flatten(2))


class MultiheadModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, HEADS, batch_first=True)
        self.stem, self.hidden, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.head(F.relu(self.hidden(x + y)))


class MultiheadOfInput(nn.Module):
    """The width of a head is computed of the size of an input, which no other can be."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class EncoderLayer(nn.Module):
    """torch.nn's own layer: the hidden layer and the heads can shrink, the stream is normed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class EncoderWithStoredMask(nn.Module):
    """torch compares a mask with the causal one, to tell attention; it is the same with and without."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(8))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return self.encoder(x, mask=self.get_buffer("mask")[:length, :length].to(x.dtype))


class DecoderWithStoredMask(EncoderWithStoredMask):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.get_buffer("mask")[: x.shape[1], : x.shape[1]].to(x.dtype)
        return self.decoder(x, self.encoder(x), tgt_mask=mask)


class HiddenLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class SwiGluPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


HEAD_PRUNING = 3 * 4
"""Half of the channels of q, k and v of two heads of 4, or one head of the two."""

ATTENTION = (
    Construct(QkvHardCoded, sequences(), removed=HEAD_PRUNING),
    Construct(QkvFreeHeads, sequences(), removed=HEAD_PRUNING),
    Construct(QkvFreeSize, sequences(), removed=HEAD_PRUNING),
    Construct(RowsOfHeads, sequences(), removed=HEAD_PRUNING),
    Construct(DefaultScale, sequences(), removed=HEAD_PRUNING),
    Construct(FusedInWindows, sequences(length=6), removed=HEAD_PRUNING),
    Construct(SingleHeadScaled, sequences(), removed=12),
    Construct(SingleHeadFused, sequences(), removed=12),
    Construct(ScaleFromShape, sequences(), removed=HEAD_PRUNING),
    Construct(Causal, sequences(), removed=HEAD_PRUNING),
    Construct(SingleHead, sequences(), removed=HEAD_PRUNING),
    Construct(BatchedHeads, sequences(), removed=HEAD_PRUNING),
    Construct(HeadsOutOfTheBatch, sequences(), removed=6),
    Construct(WideValues, sequences(), removed=8),
    Construct(WideValuesScaled, sequences(), removed=8),
    Construct(OperationItself, sequences(), removed=12),
    Construct(ScaleFromWidth, sequences(), removed=16, through_norms=True),
    Construct(PositionsForEachExample, sequences(), removed=9),
    Construct(ScaleAsTensor, sequences(), removed=9),
    Construct(ScaleInNewTensor, sequences(), removed=9),
    Construct(HeadsOfTheInput, sequences(4 * SIZE), removed=6),
    Construct(PrefixAndRotated, sequences(), removed=HEAD_PRUNING),
    Construct(PixelsOfOneHead, images(size=128), removed=16),
    Construct(MemoryOfNoRows, sequences(), removed=16),
    Construct(PackedQkv, sequences(), removed=HEAD_PRUNING),
    Construct(PackedQkvChunk, sequences(), removed=HEAD_PRUNING),
    Construct(PackedQkvIndexed, sequences(), removed=HEAD_PRUNING),
    Construct(LearnedQueries, sequences(), removed=HEAD_PRUNING),
    Construct(GroupedQuery, sequences(), removed=16),
    Construct(GroupedQueryByIndex, sequences(), removed=16),
    Construct(GroupedQueryFused, sequences(), removed=8),
    Construct(RotaryPositions, sequences(), removed=HEAD_PRUNING),
    Construct(RotaryEverywhere, sequences(), removed=HEAD_PRUNING),
    Construct(RotaryInPart, sequences(), removed=2 * HEAD_PRUNING),
    Construct(RotaryOfLength, sequences(), removed=24),
    Construct(RelativePositions, sequences(), removed=HEAD_PRUNING),
    Construct(RelativePositionsInTwoAxes, sequences(), removed=HEAD_PRUNING),
    Construct(QueryNorm, sequences(), removed=HEAD_PRUNING),
    Construct(EinsumAttention, sequences(), removed=HEAD_PRUNING),
    Construct(ConvAttention, images(), removed=8),
    Construct(CrossAttention, pairs(sequences(), sequences(7, 4)), removed=12),
    Construct(HeadsBesideHeads, sequences(), removed=19),
    Construct(MultiheadModule, sequences(), removed=12),
    Construct(MultiheadOfInput, sequences(), removed=8),
    Construct(EncoderLayer, sequences(), removed=8),
    Construct(EncoderWithStoredMask, sequences(), removed=16),
    Construct(DecoderWithStoredMask, sequences(), removed=24),
    Construct(HiddenLayer, sequences(), removed=8),
    Construct(SwiGlu, sequences(), removed=8),
    Construct(SwiGluPacked, sequences(), removed=8),
)
