"""Own models that differ in how they hold and call their layers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .case import CLASSES, ROWS, WIDTH, Made, case, classify, noise, reconstruct
from .own_feedforward import Residual


class Attributes(nn.Module):
    """Layers as attributes l0, l1, ..., called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.l0, self.l1, self.l2 = Residual(), Residual(), Residual()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.l2(self.l1(self.l0(inputs))))


@case("layers as attributes")
def layers_as_attributes() -> Made:
    return Attributes(), {"inputs": noise(ROWS, WIDTH)}, classify


class ByNumber(nn.Module):
    """add_module in a loop, getattr in a loop."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(4):
            self.add_module(f"block_{index}", Residual())

    def forward(self, inputs: Tensor) -> Tensor:
        for index in range(4):
            inputs = getattr(self, f"block_{index}")(inputs)
        return inputs


@case("layers as attributes")
def layers_by_getattr() -> Made:
    return ByNumber(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class PythonList(Attributes):
    """The same modules in an ordinary list too, which the loop goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [self.l0, self.l1, self.l2]

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.order:
            inputs = layer(inputs)
        return self.head(inputs)


@case("layers as attributes")
def layers_in_a_python_list() -> Made:
    return PythonList(), {"inputs": noise(ROWS, WIDTH)}, classify


def _three() -> nn.ModuleList:
    return nn.ModuleList(Residual() for _ in range(3))


class TwoLists(nn.Module):
    """One after the other; `meets`: the second one sees the result of the first again."""

    def __init__(self, *, meets: bool) -> None:
        super().__init__()
        self.first, self.second, self.meets = _three(), _three(), meets

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.first:
            inputs = layer(inputs)
        hidden = torch.tanh(inputs)
        for layer in self.second:
            hidden = layer(hidden)
        return hidden + inputs if self.meets else hidden


@case("two lists")
def two_lists_in_a_row() -> Made:
    return TwoLists(meets=False), {"inputs": noise(ROWS, WIDTH)}, reconstruct


@case("two lists")
def two_lists_with_a_skip() -> Made:
    return TwoLists(meets=True), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Alternating(nn.Module):
    """Two lists that take turns, as attention and perceptrons do in many repositories."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.perceptrons = _three()

    def forward(self, inputs: Tensor) -> Tensor:
        for mixer, perceptron in zip(self.mixers, self.perceptrons, strict=True):
            inputs = perceptron(inputs + mixer(inputs))
        return inputs


@case("two lists")
def two_lists_that_take_turns() -> Made:
    return Alternating(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Stages(nn.Module):
    """A list of lists, of different widths."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(Residual(width) for _ in range(2)) for width in widths
        )
        pairs = zip((WIDTH, *widths), widths, strict=False)
        self.between = nn.ModuleList(nn.Linear(*pair) for pair in pairs)

    def forward(self, inputs: Tensor) -> Tensor:
        for linear, stage in zip(self.between, self.stages, strict=True):
            inputs = linear(inputs)
            for layer in stage:
                inputs = layer(inputs)
        return inputs


@case("list of lists")
def stages_of_one_width() -> Made:
    return Stages(WIDTH, WIDTH, WIDTH), {"inputs": noise(ROWS, WIDTH)}, reconstruct


@case("list of lists")
def stages_of_several_widths() -> Made:
    return Stages(WIDTH, 2 * WIDTH, CLASSES), {"inputs": noise(ROWS, WIDTH)}, classify


class Triple(nn.Module):
    """lucidrains' idiom: each entry a ModuleList of norm, mixing, perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Residual()])
            for _ in range(3)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        for norm, linear, perceptron in self.layers:
            inputs = perceptron(inputs + linear(norm(inputs)))
        return inputs


@case("list of lists")
def layers_unpacked_in_the_loop() -> Made:
    return Triple(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Loop(nn.Module):
    """A list, and a way to go through it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers, self.way = _three(), way

    def forward(self, inputs: Tensor) -> Tensor:
        layers = list(self.layers)
        if self.way == "backwards":
            layers = layers[::-1]
        if self.way == "skipping":
            layers = layers[::2]
        for layer in layers:
            if self.way == "checkpoint":
                inputs = checkpoint(layer, inputs, use_reentrant=False)
            else:
                inputs = layer(inputs)
        return inputs


@case("ways through a list")
def layers_backwards() -> Made:
    return Loop("backwards"), {"inputs": noise(ROWS, WIDTH)}, reconstruct


@case("ways through a list")
def layers_left_out() -> Made:
    """The middle one never runs."""
    return Loop("skipping"), {"inputs": noise(ROWS, WIDTH)}, reconstruct


@case("ways through a list")
def layers_under_checkpoint() -> Made:
    return Loop("checkpoint"), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Stacked(nn.Module):
    """No modules: weights of all layers in one tensor, as a scan has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        for weight in self.weights:
            inputs = inputs + torch.tanh(inputs @ weight)
        return inputs


@case("weights without modules")
def stacked_weights() -> Made:
    return Stacked(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        matrices = [nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(4)]
        self.weights = nn.ParameterList(matrices)

    def forward(self, inputs: Tensor) -> Tensor:
        for weight in self.weights:
            inputs = inputs + torch.tanh(inputs @ weight)
        return inputs


@case("weights without modules")
def parameter_list() -> Made:
    return Parameters(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class LowRank(nn.Module):
    """LoRA by hand: a frozen Linear, and two small matrices beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, linear.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(linear.out_features, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) + hidden @ self.down.T @ self.up.T


@case("adapters")
def own_lora() -> Made:
    model = Loop("forwards").requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = LowRank(layer.up), LowRank(layer.down)
    return model, {"inputs": noise(ROWS, WIDTH)}, reconstruct


@case("normed weights")
def spectral_norm() -> Made:
    """Every pass changes the buffers by which the weights are normed."""
    model = Loop("forwards")
    for layer in model.layers:
        nn.utils.parametrizations.spectral_norm(layer.up)
    return model, {"inputs": noise(ROWS, WIDTH)}, reconstruct


@case("normed weights")
def weight_norm() -> Made:
    model = Loop("forwards")
    for layer in model.layers:
        nn.utils.parametrizations.weight_norm(layer.up)
    return model, {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Shared(nn.Module):
    """Layers of their own that share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _three()
        for layer in self.layers[1:]:
            layer.up = self.layers[0].up

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


@case("shared weights")
def layers_that_share_a_matrix() -> Made:
    return Shared(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


@case("shared weights")
def one_layer_entered_three_times() -> Made:
    """The same module, three times in a list."""
    model, layer = Loop("forwards"), Residual()
    model.layers = nn.ModuleList([layer] * 3)
    return model, {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Frozen(nn.Module):
    """A frozen backbone under torch.no_grad, and a list that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(Residual(), Residual()).requires_grad_(False)
        self.layers = _three()

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            inputs = self.backbone(inputs)
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


@case("frozen parts")
def frozen_backbone() -> Made:
    return Frozen(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Heads(nn.Module):
    """A trunk, and a list of heads, each of which gets what the trunk made."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = _three()
        self.heads = nn.ModuleDict({"class": nn.Linear(WIDTH, CLASSES), "value": Residual()})

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        for layer in self.trunk:
            inputs = layer(inputs)
        made = {name: head(inputs) for name, head in self.heads.items()}
        targets = made["value"].detach()[:, :CLASSES].argmax(dim=1)
        loss = F.cross_entropy(made["class"], targets) + 0.5 * made["value"].square().mean()
        return {"loss": loss, **made}


@case("several heads")
def heads_of_several_tasks() -> Made:
    return Heads(), {"inputs": noise(ROWS, WIDTH)}, None


class ListOfHeads(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.trunk:
            inputs = layer(inputs)
        return torch.stack([head(inputs) for head in self.heads], dim=1).mean(dim=1)


@case("several heads")
def heads_in_the_larger_list() -> Made:
    """An ensemble of heads has more parameters than the trunk."""
    return ListOfHeads(), {"inputs": noise(ROWS, WIDTH)}, reconstruct
