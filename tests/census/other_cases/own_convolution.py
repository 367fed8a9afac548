"""Own models with convolutions: of images, sound and series."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import CLASSES, ROWS, WIDTH, Batch, Made, case, classify, images, noise, regress


class Basic(nn.Module):
    """The block of a ResNet, with a shortcut of its own where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, *, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        kind = nn.BatchNorm2d if norm else nn.Identity
        self.norms = nn.ModuleList(kind(outputs) for _ in range(2))
        alike = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if alike else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, hidden: Tensor) -> Tensor:
        made = F.relu(self.norms[0](self.first(hidden)))
        made = self.norms[1](self.second(made))
        return F.relu(made + self.shortcut(hidden))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(Basic(8, 8), Basic(8, 8))
        self.layer2 = nn.Sequential(Basic(8, 16, 2), Basic(16, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.layer2(self.layer1(self.stem(pictures)))
        return self.head(hidden.mean(dim=(2, 3)))


@case("ResNet")
def own_resnet_of_two_stages() -> Made:
    return Residual(), {"pictures": images()}, classify


class Isotropic(nn.Module):
    """Blocks of one width in one list."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.ModuleList(Basic(8, 8, norm=norm) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.stem(pictures)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=(2, 3)))


@case("isotropic convolutions")
def isotropic_with_batch_norm() -> Made:
    return Isotropic(norm=True), {"pictures": images()}, classify


@case("isotropic convolutions")
def isotropic_without_norm() -> Made:
    return Isotropic(norm=False), {"pictures": images()}, classify


class Added(nn.Module):
    """What a module makes, and what came in."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*modules)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden)


@case("isotropic convolutions")
def conv_mixer() -> Made:
    """One Sequential from the patches to the classes."""

    def block() -> nn.Module:
        spatial = Added(nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.GELU())
        return nn.Sequential(spatial, nn.Conv2d(8, 8, 1), nn.GELU())

    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), *[block() for _ in range(3)], *ends)
    return model, {"input": images()}, classify


def double(inputs: int, outputs: int, dimensions: int = 2) -> nn.Module:
    kind = nn.Conv2d if dimensions == 2 else nn.Conv1d
    first, second = kind(inputs, outputs, 3, padding=1), kind(outputs, outputs, 3, padding=1)
    return nn.Sequential(first, nn.GroupNorm(2, outputs), nn.ReLU(), second, nn.ReLU())


class UNet(nn.Module):
    """Two lists: what goes down is looked at on the way up."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions
        widths = [(2, 4), (4, 8), (8, 16)]
        self.downs = nn.ModuleList(double(*pair, dimensions) for pair in widths)
        self.middle = double(16, 16, dimensions)
        widths = [(32, 8), (16, 4), (8, 4)]
        self.ups = nn.ModuleList(double(*pair, dimensions) for pair in widths)
        self.last = (nn.Conv2d if dimensions == 2 else nn.Conv1d)(4, 1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        skips, pool = [], F.max_pool2d if self.dimensions == 2 else F.max_pool1d
        for down in self.downs:
            inputs = down(inputs)
            skips.append(inputs)
            inputs = pool(inputs, 2)
        inputs = self.middle(inputs)
        for up in self.ups:
            inputs = F.interpolate(inputs, scale_factor=2.0)
            inputs = up(torch.cat([inputs, skips.pop()], dim=1))
        return self.last(inputs)


@case("U-Net, 2-D")
def own_unet_2d() -> Made:
    return UNet(2), {"inputs": noise(ROWS, 2, 16, 16)}, regress


@case("U-Net, 1-D")
def own_unet_1d() -> Made:
    return UNet(1), {"inputs": noise(ROWS, 2, 16)}, regress


class NamedUNet(nn.Module):
    """The U-Net of a paper's repository: every stage an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.enc1, self.enc2, self.bottleneck = double(2, 4), double(4, 8), double(8, 16)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)
        self.dec2, self.dec1 = double(16, 8), double(8, 4)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.enc1(inputs)
        second = self.enc2(F.max_pool2d(first, 2))
        hidden = self.bottleneck(F.max_pool2d(second, 2))
        hidden = self.dec2(torch.cat([self.up2(hidden), second], dim=1))
        return self.out(self.dec1(torch.cat([self.up1(hidden), first], dim=1)))


@case("U-Net, 1-D")
def own_unet_of_attributes() -> Made:
    return NamedUNet(), {"inputs": noise(ROWS, 2, 16, 16)}, regress


class Growing(nn.Module):
    def __init__(self, inputs: int, growth: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, growth, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden, self.conv(F.relu(hidden))], dim=1)


class DenseBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Growing(3 + 4 * index) for index in range(4))
        self.head = nn.Linear(19, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        for layer in self.layers:
            pictures = layer(pictures)
        return self.head(pictures.mean(dim=(2, 3)))


@case("densely connected")
def own_dense_net() -> Made:
    """Every layer returns more channels than it is given."""
    return DenseBlocks(), {"pictures": images(8)}, classify


class Gated(nn.Module):
    """WaveNet's block: what goes on, and what goes to the end."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=dilation)
        self.onward, self.skip = nn.Conv1d(WIDTH, WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        made, gate = self.conv(F.pad(hidden, (self.dilation, 0))).chunk(2, dim=1)
        made = torch.tanh(made) * torch.sigmoid(gate)
        return hidden + self.onward(made), self.skip(made)


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, WIDTH, 1)
        self.blocks = nn.ModuleList(Gated(2**index) for index in range(3))
        self.end = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, sound: Tensor) -> Tensor:
        hidden, total = self.start(sound), 0.0
        for block in self.blocks:
            hidden, skip = block(hidden)
            total = total + skip
        return self.end(torch.relu(total))


@case("WaveNet")
def wavenet() -> Made:
    return WaveNet(), {"sound": noise(ROWS, 1, 16)}, regress


class Temporal(nn.Module):
    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.conv = norm(nn.Conv1d(inputs, outputs, 3, dilation=dilation))
        self.shortcut = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.dilation = dilation

    def forward(self, series: Tensor) -> Tensor:
        made = self.conv(F.pad(series, (2 * self.dilation, 0)))
        return torch.relu(made + self.shortcut(series))


class Temporals(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        widths = [first, WIDTH, WIDTH, WIDTH]
        self.network = nn.Sequential(*[Temporal(widths[i], widths[i + 1], 2**i) for i in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.network(series)[:, :, -1])


@case("TCN")
def own_tcn() -> Made:
    """Its first block makes eight channels of three."""
    return Temporals(3), {"series": noise(ROWS, 3, 16)}, classify


@case("TCN")
def own_tcn_of_one_width() -> Made:
    return Temporals(WIDTH), {"series": noise(ROWS, WIDTH, 16)}, classify


class Sharper(nn.Module):
    """Super-resolution: a body with one long skip around it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(
            *[Added(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)],
        )
        self.tail = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, pictures: Tensor) -> Tensor:
        first = self.head(pictures)
        return self.tail(first + self.body(first))


@case("super-resolution")
def edsr() -> Made:
    return Sharper(), {"pictures": images(8)}, regress


class Pyramid(nn.Module):
    """Stages, and a list of lateral convolutions that look at all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv2d(a, 8, 3, 2, padding=1) for a in (3, 8, 8))
        self.lateral = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        levels = []
        for stage in self.stages:
            pictures = torch.relu(stage(pictures))
            levels.append(pictures)
        hidden = self.lateral[-1](levels[-1])
        for level, lateral in zip(levels[-2::-1], self.lateral[-2::-1], strict=False):
            hidden = F.interpolate(hidden, scale_factor=2.0) + lateral(level)
        return self.out(hidden)


@case("FPN")
def own_pyramid() -> Made:
    return Pyramid(), {"pictures": images()}, regress


class Timed(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.time = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Linear(8, outputs)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        return F.silu(self.conv(hidden) + self.time(time)[:, :, None, None])


class Denoiser(nn.Module):
    """A diffusion U-Net: every block sees when it is."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        self.downs = nn.ModuleList([Timed(3, 8), Timed(8, 8)])
        self.ups = nn.ModuleList([Timed(16, 8), Timed(16, 8)])
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        waves = times[:, None] * torch.exp(-torch.arange(4.0))
        time, skips = self.time(torch.cat([waves.sin(), waves.cos()], dim=1)), []
        for down in self.downs:
            noisy = down(noisy, time)
            skips.append(noisy)
            noisy = F.avg_pool2d(noisy, 2)
        for up in self.ups:
            noisy = F.interpolate(noisy, scale_factor=2.0)
            noisy = up(torch.cat([noisy, skips.pop()], dim=1), time)
        return self.out(noisy)


def _denoised(outputs: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(outputs, 0.3 * batch["noisy"])


@case("own diffusion models")
def own_diffusion_unet() -> Made:
    return Denoiser(), {"noisy": images(8), "times": noise(ROWS).abs()}, _denoised


class TimedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.shift(time).chunk(2, dim=-1)
        return hidden + torch.tanh(self.inner(hidden) * (1 + scale) + shift)


class PointDenoiser(nn.Module):
    """Diffusion of points: time is embedded once, and given to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.time = nn.Linear(2, WIDTH), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(TimedBlock() for _ in range(4))
        self.end = nn.Linear(WIDTH, 2)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        time, hidden = F.silu(self.time(times[:, None])), self.start(noisy)
        for block in self.blocks:
            hidden = block(hidden, time)
        return self.end(hidden)


@case("own diffusion models")
def diffusion_of_points() -> Made:
    return PointDenoiser(), {"noisy": noise(ROWS, 2), "times": noise(ROWS).abs()}, _denoised
