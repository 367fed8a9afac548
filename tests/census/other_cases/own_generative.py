"""Own generative models: autoencoders, flows, reversible networks. Their noise is in the batch."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import ROWS, WIDTH, Batch, Made, case, classify, first, noise, reconstruct


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@case("autoencoder")
def own_autoencoder() -> Made:
    """An encoder and a decoder, both Sequentials, in a Sequential."""
    model = nn.Sequential(perceptron(WIDTH, 16, 4), perceptron(4, 16, WIDTH))
    return model, {"input": noise(ROWS, WIDTH)}, reconstruct


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(WIDTH, 16, 16), perceptron(4, 16, WIDTH)
        self.mean, self.log_variance = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, inputs: Tensor, noise: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder(inputs)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        made = self.decoder(mean + noise * torch.exp(log_variance / 2))
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
        return {"loss": F.mse_loss(made, inputs) + 0.1 * divergence.mean(), "made": made}


@case("VAE")
def own_vae() -> Made:
    return Variational(), {"inputs": noise(ROWS, WIDTH), "noise": noise(ROWS, 4)}, None


class Ladder(nn.Module):
    """A hierarchical VAE: a list upwards, a list downwards, a loss of every level."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.posterior = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(3))
        self.start = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs: Tensor, noise: Tensor) -> dict[str, Tensor]:
        made, hidden = [], inputs
        for layer in self.up:
            hidden = torch.tanh(layer(hidden))
            made.append(hidden)
        hidden, loss = self.start.expand_as(hidden), 0.0
        for level, layer in enumerate(self.posterior):
            both = layer(torch.cat([hidden, made[-1 - level]], dim=1)).chunk(2, dim=1)
            hidden = hidden + both[0] + noise[:, level] * torch.exp(both[1])
            loss = loss + (both[0].square() + (2 * both[1]).exp() - 1 - 2 * both[1]).mean() / 2
        return {"loss": F.mse_loss(hidden, inputs) + 0.1 * loss}


@case("VAE")
def ladder_vae() -> Made:
    return Ladder(), {"inputs": noise(ROWS, WIDTH), "noise": noise(ROWS, 3, WIDTH)}, None


class Quantized(nn.Module):
    """A codebook, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(WIDTH, 16, 16, 4), perceptron(4, 16, 16, WIDTH)
        self.codes = nn.Embedding(12, 4)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        made = self.encoder(inputs)
        code = self.codes(torch.cdist(made, self.codes.weight).argmin(dim=1))
        output = self.decoder(made + (code - made).detach())
        commitment = F.mse_loss(code, made.detach()) + 0.25 * F.mse_loss(made, code.detach())
        return {"loss": F.mse_loss(output, inputs) + commitment}


@case("VQ-VAE")
def own_vq_vae() -> Made:
    return Quantized(), {"inputs": noise(ROWS, WIDTH)}, None


class Coupling(nn.Module):
    """Half of the numbers decide how the others are scaled and shifted."""

    def __init__(self, *, flipped: bool) -> None:
        super().__init__()
        self.flipped = flipped
        self.net = perceptron(WIDTH // 2, 16, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = hidden.chunk(2, dim=1)[:: -1 if self.flipped else 1]
        scale, shift = self.net(kept).chunk(2, dim=1)
        scale = torch.tanh(scale)
        halves = [kept, changed * scale.exp() + shift][:: -1 if self.flipped else 1]
        return torch.cat(halves, dim=1), scale.sum(dim=1)


class Flow(nn.Module):
    """RealNVP: what every layer adds to the determinant is added up outside."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList(Coupling(flipped=bool(index % 2)) for index in range(4))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        total = inputs.new_zeros(len(inputs))
        for flow in self.flows:
            inputs, own = flow(inputs)
            total = total + own
        return inputs, total


def likelihood(outputs: tuple[Tensor, Tensor], _: Batch) -> Tensor:
    made, determinant = outputs
    density = -(made.square() + math.log(2 * math.pi)).sum(dim=1) / 2
    return -(density + determinant).mean()


@case("normalizing flow")
def real_nvp() -> Made:
    return Flow(), {"inputs": noise(ROWS, WIDTH)}, likelihood


class Carried(nn.Module):
    """A coupling whose determinant is a last column of the hidden state."""

    def __init__(self, *, flipped: bool) -> None:
        super().__init__()
        self.coupling = Coupling(flipped=flipped)

    def forward(self, hidden: Tensor) -> Tensor:
        made, own = self.coupling(hidden[:, :-1])
        return torch.cat([made, hidden[:, -1:] + own[:, None]], dim=1)


class CarriedFlow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.Sequential(*[Carried(flipped=bool(index % 2)) for index in range(4)])

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        made = self.flows(F.pad(inputs, (0, 1)))
        return made[:, :-1], made[:, -1]


@case("normalizing flow")
def flow_that_carries_its_determinant() -> Made:
    return CarriedFlow(), {"inputs": noise(ROWS, WIDTH)}, likelihood


class Masked(nn.Linear):
    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight * self.mask, self.bias)


class Autoregressive(nn.Module):
    """MADE: masks let every output see only the inputs before it."""

    def __init__(self) -> None:
        super().__init__()
        below = torch.ones(WIDTH, WIDTH).tril()
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [Masked(below), nn.ReLU()]
        self.net = nn.Sequential(*layers, Masked(below.tril(-1)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


@case("masked autoregression")
def made() -> Made:
    return Autoregressive(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        left = left + torch.tanh(self.f(right))
        return left, right + torch.tanh(self.g(left))


class Reversible(nn.Module):
    """Two halves pass through every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Half() for _ in range(3))
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        left = right = inputs
        for block in self.blocks:
            left, right = block(left, right)
        return self.head(torch.cat([left, right], dim=1))


@case("reversible network")
def reversible_halves() -> Made:
    return Reversible(), {"inputs": noise(ROWS, WIDTH)}, classify


class Joined(Half):
    def forward(self, both: Tensor) -> Tensor:
        return torch.cat(super().forward(*both.chunk(2, dim=1)), dim=1)


class JoinedReversible(nn.Module):
    """The halves are one tensor between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Joined() for _ in range(3))
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.cat([inputs, inputs], dim=1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@case("reversible network")
def reversible_of_one_tensor() -> Made:
    return JoinedReversible(), {"inputs": noise(ROWS, WIDTH)}, classify


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(WIDTH, 16, 16, 16, 1)

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        return torch.stack([self.net(real), self.net(fake)])


@case("adversarial")
def discriminator_called_twice() -> Made:
    """A critic of real and made examples."""

    def loss(outputs: Tensor, _: Batch) -> Tensor:
        return F.softplus(-outputs[0]).mean() + F.softplus(outputs[1]).mean()

    batch = {"real": noise(ROWS, WIDTH), "fake": noise(ROWS, WIDTH, seed=7)}
    return Energy(), batch, loss


class MaskedAutoencoder(nn.Module):
    """Patches that the batch names are left out, and made from the others."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.decoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.places = nn.Parameter(torch.randn(6, WIDTH))
        self.hole = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, patches: Tensor, order: Tensor) -> Tensor:
        place = order[..., None].expand(-1, -1, WIDTH)
        seen = (patches + self.places).gather(1, place[:, :3])
        made = self.encoder(seen)
        filled = torch.cat([made, self.hole.expand(len(made), 3, -1)], dim=1)
        return self.decoder(torch.zeros_like(filled).scatter(1, place, filled) + self.places)


@case("masked autoencoder")
def own_mae() -> Made:
    order = torch.stack([torch.arange(6).roll(row) for row in range(ROWS)])
    batch = {"patches": noise(ROWS, 6, WIDTH), "order": order}
    return MaskedAutoencoder(), batch, lambda o, b: F.mse_loss(o, first(b))
