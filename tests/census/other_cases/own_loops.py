"""Own models whose layers run in loops, leave early, are weighed, made or chosen."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import CLASSES, LENGTH, ROWS, WIDTH, Made, case, classify, labels, noise, reconstruct
from .own_feedforward import Residual


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)


class Universal(nn.Module):
    """One layer, again and again, with an embedding of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.times = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        for time in self.times:
            inputs = self.layer(inputs + time)
        return inputs


@case("repeated layers")
def universal_transformer() -> Made:
    return Universal(), {"inputs": noise(ROWS, LENGTH, WIDTH)}, reconstruct


class Cycled(Stack):
    """The whole list, twice."""

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                inputs = layer(inputs)
        return self.head(inputs)


@case("repeated layers")
def list_run_twice() -> Made:
    return Cycled(), {"inputs": noise(ROWS, WIDTH)}, classify


class Recycled(Stack):
    """AlphaFold's recycling: passes without a graph, then one with."""

    def forward(self, inputs: Tensor) -> Tensor:
        before = torch.zeros_like(inputs)
        for last in (False, False, True):
            with torch.set_grad_enabled(last and torch.is_grad_enabled()):
                hidden = inputs + before
                for layer in self.layers:
                    hidden = layer(hidden)
                before = hidden
        return self.head(before)


@case("repeated layers")
def recycled_without_a_graph() -> Made:
    return Recycled(), {"inputs": noise(ROWS, WIDTH)}, classify


class Hierarchical(nn.Module):
    """HRM: a fast module within a slow one; only the last round has a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.ModuleList(Residual() for _ in range(2))
        self.slow = nn.ModuleList(Residual() for _ in range(2))
        self.start = nn.Parameter(torch.randn(2, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def _run(self, layers: nn.ModuleList, hidden: Tensor) -> Tensor:
        for layer in layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, inputs: Tensor) -> Tensor:
        high, low = self.start[:, None].expand(2, *inputs.shape)
        with torch.no_grad():
            for _ in range(2):
                for _ in range(2):
                    low = self._run(self.fast, low + high + inputs)
                high = self._run(self.slow, high + low)
        low = self._run(self.fast, low + high + inputs)
        return self.head(self._run(self.slow, high + low))


@case("hierarchical reasoning")
def hrm() -> Made:
    return Hierarchical(), {"inputs": noise(ROWS, WIDTH)}, classify


class Flowing(nn.Module):
    """A neural ODE: Runge-Kutta steps of one network."""

    def __init__(self, order: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.order = order

    def forward(self, inputs: Tensor) -> Tensor:
        step = 0.25
        for _ in range(4):
            slope = self.net(inputs)
            if self.order == 2:
                slope = self.net(inputs + step / 2 * slope)
            inputs = inputs + step * slope
        return inputs


@case("neural ODE")
def euler_steps() -> Made:
    return Flowing(1), {"inputs": noise(ROWS, WIDTH)}, reconstruct


@case("neural ODE")
def midpoint_steps() -> Made:
    return Flowing(2), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Equilibrium(nn.Module):
    """A fixed point is found without a graph; its gradient goes through one more step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def _step(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden) / 2 + inputs)
        return hidden

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.zeros_like(inputs)
        with torch.no_grad():
            for _ in range(5):
                hidden = self._step(hidden, inputs)
        return self._step(hidden, inputs)


@case("deep equilibrium")
def deep_equilibrium() -> Made:
    return Equilibrium(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class EarlyExit(Stack):
    """A loss after every layer, through one head."""

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        losses = []
        for layer in self.layers:
            inputs = layer(inputs)
            losses.append(F.cross_entropy(self.head(inputs), labels))
        return {"loss": torch.stack(losses).mean()}


@case("early exit")
def early_exit_losses() -> Made:
    return EarlyExit(), {"inputs": noise(ROWS, WIDTH), "labels": labels()}, None


class Leaving(Stack):
    """It leaves when it is sure, which no row is."""

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
            logits = self.head(inputs)
            if bool((logits.softmax(dim=-1).amax(dim=-1) > 0.999).all()):
                return logits
        return self.head(inputs)


@case("early exit")
def early_exit_when_sure() -> Made:
    return Leaving(), {"inputs": noise(ROWS, WIDTH)}, classify


class Halting(nn.Module):
    """Adaptive computation time: what is not spent weighs what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.halt = Residual(), nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        left, total = torch.ones(len(inputs), 1), torch.zeros_like(inputs)
        for _ in range(3):
            inputs = self.layer(inputs)
            share = torch.sigmoid(self.halt(inputs))
            total, left = total + left * share * inputs, left * (1 - share)
        return total + left * inputs


@case("early exit")
def adaptive_computation_time() -> Made:
    return Halting(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class DeepSupervision(Stack):
    """A head of its own for every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in self.layers)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = 0.0
        for layer, head in zip(self.layers, self.heads, strict=True):
            inputs = layer(inputs)
            loss = loss + F.cross_entropy(head(inputs), labels)
        return {"loss": loss + F.cross_entropy(self.head(inputs), labels)}


@case("deep supervision")
def heads_at_every_layer() -> Made:
    return DeepSupervision(), {"inputs": noise(ROWS, WIDTH), "labels": labels()}, None


class Mixed(Stack):
    """ELMo: a learned mean of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        made = [inputs]
        for layer in self.layers:
            made.append(layer(made[-1]))
        shares = self.weights.softmax(dim=0)
        return self.head(sum(share * one for share, one in zip(shares, made, strict=True)))


@case("mean of all layers")
def scalar_mix() -> Made:
    return Mixed(), {"inputs": noise(ROWS, WIDTH)}, classify


class Dropped(Stack):
    """Stochastic depth; what is dropped is in the batch."""

    def forward(self, inputs: Tensor, kept: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            made = layer(inputs)
            inputs = torch.where(kept[:, index, None], made, inputs)
        return self.head(inputs)


@case("stochastic depth")
def depth_dropped_by_rows() -> Made:
    kept = torch.arange(ROWS)[:, None] % torch.arange(2, 5) > 0
    return Dropped(), {"inputs": noise(ROWS, WIDTH), "kept": kept}, classify


class DroppedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, hidden: Tensor, kept: Tensor) -> Tensor:
        return torch.where(kept[:, None], self.inner(hidden), hidden)


class DroppedInside(Stack):
    """The same, inside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DroppedLayer() for _ in range(3))

    def forward(self, inputs: Tensor, kept: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            inputs = layer(inputs, kept[:, index])
        return self.head(inputs)


@case("stochastic depth")
def depth_dropped_inside_layers() -> Made:
    kept = torch.arange(ROWS)[:, None] % torch.arange(2, 5) > 0
    return DroppedInside(), {"inputs": noise(ROWS, WIDTH), "kept": kept}, classify


class Experts(nn.Module):
    """The best of four perceptrons for every row; `aux` is what a router's loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.aux: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        shares = self.router(hidden).softmax(dim=-1)
        share, best = shares.max(dim=-1)
        made = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            rows = best == index
            made[rows] = expert(hidden[rows])
        self.aux = shares.square().sum(dim=-1).mean()
        return hidden + share[:, None] * made


class Mixture(nn.Module):
    def __init__(self, *, collects: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.head, self.collects = nn.Linear(WIDTH, CLASSES), collects

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            inputs = block(inputs)
        loss = F.cross_entropy(self.head(inputs), labels)
        if self.collects:
            loss = loss + 0.1 * sum(block.aux for block in self.blocks)
        return {"loss": loss}


@case("mixture of experts")
def experts() -> Made:
    batch = {"inputs": noise(ROWS, WIDTH), "labels": labels()}
    return Mixture(collects=False), batch, None


@case("mixture of experts")
def experts_with_a_loss_in_an_attribute() -> Made:
    """Layers leave their part of the loss in themselves."""
    batch = {"inputs": noise(ROWS, WIDTH), "labels": labels()}
    return Mixture(collects=True), batch, None


class Returning(Experts):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        made = super().forward(hidden)
        return made, self.aux


class ReturnedMixture(Mixture):
    def __init__(self) -> None:
        super().__init__(collects=True)
        self.blocks = nn.ModuleList(Returning() for _ in range(3))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        total = 0.0
        for block in self.blocks:
            inputs, aux = block(inputs)
            total = total + aux
        return {"loss": F.cross_entropy(self.head(inputs), labels) + 0.1 * total}


@case("mixture of experts")
def experts_that_return_a_loss() -> Made:
    return ReturnedMixture(), {"inputs": noise(ROWS, WIDTH), "labels": labels()}, None


class Hypernetwork(nn.Module):
    """The weights of the layers are made from an embedding of their number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Embedding(3, 4)
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH * WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        for weight in self.maker(self.layers.weight).unflatten(-1, (WIDTH, WIDTH)):
            inputs = inputs + torch.tanh(inputs @ weight)
        return inputs


@case("hypernetwork")
def weights_made_by_a_network() -> Made:
    return Hypernetwork(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Called(nn.Module):
    """Layers whose weights another network makes, by torch.func.functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shift = nn.Parameter(torch.randn(WIDTH) / 4)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            weights = {"weight": layer.weight, "bias": layer.bias + self.shift}
            inputs = torch.func.functional_call(layer, weights, (inputs,))
        return inputs


@case("hypernetwork")
def layers_called_with_other_weights() -> Made:
    return Called(), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Routed(nn.Module):
    """Mixture of depths: half of the words pass a layer, the others go by it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.inner = nn.Linear(WIDTH, 1), Residual()

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.router(hidden)
        best = scores.topk(hidden.shape[1] // 2, dim=1).indices.expand(-1, -1, WIDTH)
        made = self.inner(hidden.gather(1, best)) * torch.sigmoid(scores).expand_as(hidden).gather(
            1, best
        )
        return hidden.scatter_add(1, best, made)


class MixtureOfDepths(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs.mean(dim=1))


@case("mixture of depths")
def mixture_of_depths() -> Made:
    return MixtureOfDepths(), {"inputs": noise(ROWS, LENGTH, WIDTH)}, classify
