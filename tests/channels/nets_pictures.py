"""Language models that see pictures, as many rows of each as a tensor of counts says."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.channels.construct import Construct, Inputs

WIDTH, HEADS, PICTURE = 16, 4, 0


def pictured_text(batch: int) -> Inputs:
    """Word numbers, (batch, length), with two of a picture each; rows of pictures; how many of each."""
    words = torch.randint(1, 11, (batch, 5))
    words[:, 1:3] = PICTURE
    return words, torch.randn(2 * batch, 6, dtype=torch.float64), torch.full((batch,), 2)


def check_rows(ok: Tensor, message: str) -> None:
    """Fail with the message unless all is well."""
    if not ok:
        raise ValueError(message)


class SeesPictures(nn.Module):
    """Rows of pictures take the place of some words, and attention turns by places that a method counts."""

    def __init__(self) -> None:
        super().__init__()
        self.eye, self.words = nn.Linear(6, WIDTH), nn.Embedding(11, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, 3)

    def pictures(self, patches: Tensor, counts: Tensor) -> Tensor:
        """The rows of each picture, from its last to its first."""
        return torch.cat([rows.flip(0) for rows in self.eye(patches).split(counts.tolist())])

    def places(self, words: Tensor, counts: Tensor) -> Tensor:
        """Where each word is, along three axes, (3, batch, length)."""
        return (torch.arange(words.shape[1]) + counts.tolist()[0]).expand(3, *words.shape)

    def heads(self, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x).view(x.shape[0], x.shape[1], -1, WIDTH // HEADS).transpose(1, 2)

    def forward(self, words: Tensor, patches: Tensor, counts: Tensor) -> Tensor:
        x, seen = self.words(words), words == PICTURE
        rows = self.pictures(patches, counts)
        check_rows(seen.sum() * WIDTH == rows.numel(), f"there are {rows.shape[0]} rows of pictures")
        x = x.masked_scatter(seen[..., None], rows.to(x.device, x.dtype))
        places = self.places(words, counts)
        if places.ndim == 3 and places.shape[0] == 4:
            places = places[1:]
        turn = places[0][:, None, :, None].to(rows.dtype).cos()
        query, key, value = (self.heads(x, layer) for layer in (self.query, self.key, self.value))
        query, key = query * turn, key * turn
        y = F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return self.down(self.up(x).relu())


PICTURES: tuple[Construct, ...] = (
    Construct(SeesPictures, pictured_text, removed=3 * 8 + 12, reason="joined with values that have none"),
)
