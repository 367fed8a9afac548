"""Own models without time or space: perceptrons of all kinds, and models of tables."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import (
    CLASSES,
    ROWS,
    WIDTH,
    Made,
    case,
    classify,
    integers,
    labels,
    noise,
    reconstruct,
    regress,
)


class Residual(nn.Module):
    """Norm, two matrices, and what came in."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class ResidualPerceptron(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.stem(features)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@case("residual MLP")
def residual_mlp() -> Made:
    return ResidualPerceptron(), {"features": noise(ROWS, 6)}, classify


class WithLoss(ResidualPerceptron):
    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(super().forward(features), labels)}


@case("residual MLP")
def residual_mlp_with_its_own_loss() -> Made:
    return WithLoss(), {"features": noise(ROWS, 6), "labels": labels()}, None


@case("residual MLP")
def residual_mlp_of_one_layer() -> Made:
    return ResidualPerceptron(depth=1), {"features": noise(ROWS, 6)}, classify


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        share = torch.sigmoid(self.gate(hidden) - 1.0)
        return share * torch.relu(self.made(hidden)) + (1 - share) * hidden


class HighwayNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(*[Highway() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.stack(inputs))


@case("highway network")
def highway_network() -> Made:
    return HighwayNetwork(), {"inputs": noise(ROWS, WIDTH)}, classify


class Widths(nn.Module):
    """A perceptron from a list of widths, in a list of Linears."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairs)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            inputs = torch.relu(layer(inputs))
        return self.layers[-1](inputs)


@case("MLP from a list of widths")
def mlp_of_several_widths() -> Made:
    return Widths(6, 16, 12, CLASSES), {"inputs": noise(ROWS, 6)}, classify


@case("MLP from a list of widths")
def mlp_with_activations_outside_the_list() -> Made:
    return Widths(WIDTH, WIDTH, WIDTH, WIDTH), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Mixing(nn.Module):
    def __init__(self, places: int, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.over_places = nn.Sequential(nn.Linear(places, 16), nn.GELU(), nn.Linear(16, places))
        self.over_channels = nn.Sequential(
            nn.Linear(channels, 16), nn.GELU(), nn.Linear(16, channels)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.over_places(self.norms[0](hidden).transpose(1, 2)).transpose(1, 2)
        hidden = hidden + mixed
        return hidden + self.over_channels(self.norms[1](hidden))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixing(5, WIDTH) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, patches: Tensor) -> Tensor:
        for block in self.blocks:
            patches = block(patches)
        return self.head(self.norm(patches).mean(dim=1))


@case("MLP-Mixer")
def own_mlp_mixer() -> Made:
    return Mixer(), {"patches": noise(ROWS, 5, WIDTH)}, classify


class Splines(nn.Module):
    """A Kolmogorov-Arnold layer: a sum of learned functions of every input."""

    def __init__(self, inputs: int, outputs: int, knots: int = 5) -> None:
        super().__init__()
        self.register_buffer("knots", torch.linspace(-2, 2, knots))
        self.weight = nn.Parameter(0.1 * torch.randn(outputs, inputs, knots))
        self.base = nn.Linear(inputs, outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        bumps = torch.exp(-(hidden[..., None] - self.knots).square())
        return self.base(F.silu(hidden)) + torch.einsum("bik,oik->bo", bumps, self.weight)


class Kolmogorov(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Splines(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


@case("KAN")
def kan() -> Made:
    return Kolmogorov(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Siren(nn.Module):
    """Coordinates to colours, through sines."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(2, 16), (16, 16), (16, 16), (16, 16)]
        self.net = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.colour = nn.Linear(16, 3)

    def forward(self, places: Tensor) -> Tensor:
        for layer in self.net:
            places = torch.sin(5.0 * layer(places))
        return self.colour(places)


@case("implicit representation")
def siren() -> Made:
    return Siren(), {"places": noise(ROWS, 7, 2)}, regress


class Radiance(nn.Module):
    """NeRF: what came in is given once more in the middle."""

    def __init__(self, skip: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.layers = nn.ModuleList(
            nn.Linear(16 + (12 if index == skip else 0), 16) for index in range(4)
        )
        self.skip = skip
        self.density, self.colour = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, points: Tensor) -> Tensor:
        waves = [function(2.0**k * points) for k in range(2) for function in (torch.sin, torch.cos)]
        encoded = torch.cat(waves, dim=-1)
        hidden = self.first(encoded)
        for index, layer in enumerate(self.layers):
            if index == self.skip:
                hidden = torch.cat([hidden, encoded], dim=-1)
            hidden = torch.relu(layer(hidden))
        return torch.cat([self.density(hidden), self.colour(hidden)], dim=-1)


@case("implicit representation")
def nerf() -> Made:
    return Radiance(), {"points": noise(ROWS, 7, 3)}, regress


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, first: Tensor) -> Tensor:
        return first * self.linear(hidden) + hidden


class DeepAndCross(nn.Module):
    """Tables of categories, cross layers that all see what came in, and a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(7, 2) for _ in range(3))
        self.cross = nn.ModuleList(Cross() for _ in range(3))
        self.deep = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU())
        self.head = nn.Linear(WIDTH + 4, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        first = hidden = torch.cat([numbers, *looked_up], dim=1)
        for layer in self.cross:
            hidden = layer(hidden, first)
        return self.head(torch.cat([hidden, self.deep(first)], dim=1))


@case("recommender")
def deep_and_cross() -> Made:
    batch = {"numbers": noise(ROWS, 2), "categories": integers(7, ROWS, 3)}
    return DeepAndCross(), batch, regress


class Recommender(nn.Module):
    """DLRM: two perceptrons, with products of embeddings between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 4) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))
        self.top = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        vectors = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack([dense, *vectors], dim=1)
        pairs = (stacked @ stacked.transpose(1, 2)).flatten(1)[:, [1, 2, 3, 6, 7, 11]]
        return self.top(torch.cat([dense, pairs], dim=1))


@case("recommender")
def dlrm() -> Made:
    batch = {"numbers": noise(ROWS, 5), "categories": integers(50, ROWS, 3)}
    return Recommender(), batch, regress


class Dense(nn.Module):
    """Every layer sees what all before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 * (n + 1), 6) for n in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        made = [inputs]
        for layer in self.layers:
            made.append(torch.relu(layer(torch.cat(made, dim=1))))
        return made[-1]


@case("densely connected")
def dense_mlp() -> Made:
    return Dense(), {"inputs": noise(ROWS, 6)}, reconstruct
