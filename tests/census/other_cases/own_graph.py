"""Own models of graphs, sets and points."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import CLASSES, ROWS, WIDTH, Made, case, classify, integers, noise, regress

NODES = 5


def adjacency() -> Tensor:
    """A graph of its own for every row."""
    edges = (integers(2, ROWS, NODES, NODES) + torch.eye(NODES)).clamp(max=1)
    return edges / edges.sum(dim=-1, keepdim=True)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return torch.relu(self.linear(adjacency @ nodes))


class DenseGraph(nn.Module):
    """Every row is a graph; the list is of convolutions, which get the graph too."""

    def __init__(self, *, jumps: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution() for _ in range(3))
        self.head = nn.Linear(WIDTH * (3 if jumps else 1), CLASSES)
        self.jumps = jumps

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        made = []
        for layer in self.layers:
            nodes = layer(nodes, adjacency)
            made.append(nodes)
        return self.head((torch.cat(made, dim=-1) if self.jumps else nodes).mean(dim=1))


@case("own graph networks")
def gcn_of_dense_graphs() -> Made:
    batch = {"nodes": noise(ROWS, NODES, WIDTH), "adjacency": adjacency()}
    return DenseGraph(jumps=False), batch, classify


@case("own graph networks")
def gin_with_jumping_knowledge() -> Made:
    """What all layers made is read at the end."""
    batch = {"nodes": noise(ROWS, NODES, WIDTH), "adjacency": adjacency()}
    return DenseGraph(jumps=True), batch, classify


class Messages(nn.Module):
    """Nodes and edges are both changed by every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.node = nn.Linear(3 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, nodes: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*nodes.shape[:2], *nodes.shape[1:])
        ends = [nodes[:, :, None].expand(shape), nodes[:, None].expand(shape)]
        edges = edges + torch.tanh(self.edge(torch.cat([*ends, edges], dim=-1)))
        summed = torch.cat([nodes, edges.sum(dim=2)], dim=-1)
        return nodes + torch.tanh(self.node(summed)), edges


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Messages() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            nodes, edges = layer(nodes, edges)
        return self.head(nodes.mean(dim=1))


@case("own graph networks")
def message_passing_with_edges() -> Made:
    batch = {"nodes": noise(ROWS, NODES, WIDTH), "edges": noise(ROWS, NODES, NODES, WIDTH)}
    return MessagePassing(), batch, classify


class Equivariant(nn.Module):
    """EGNN: features, and places that move."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.weight = nn.Linear(2 * WIDTH + 1, WIDTH), nn.Linear(WIDTH, 1)
        self.update = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        features, places = state
        apart = places[:, :, None] - places[:, None]
        shape = (*features.shape[:2], *features.shape[1:])
        ends = [features[:, :, None].expand(shape), features[:, None].expand(shape)]
        distance = apart.square().sum(dim=-1, keepdim=True)
        messages = F.silu(self.message(torch.cat([*ends, distance], dim=-1)))
        moved = places + (apart * torch.tanh(self.weight(messages))).mean(dim=2)
        joined = torch.cat([features, messages.sum(dim=2)], dim=-1)
        return features + self.update(joined), moved


class Molecule(nn.Module):
    """A Sequential of layers that take and return a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Embedding(6, WIDTH)
        self.layers = nn.Sequential(*[Equivariant() for _ in range(3)])
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, places: Tensor, kinds: Tensor) -> Tensor:
        features, _ = self.layers((self.atoms(kinds), places))
        return self.energy(features).sum(dim=1)


@case("molecules")
def egnn() -> Made:
    batch = {"places": noise(ROWS, NODES, 3), "kinds": integers(6, ROWS, NODES)}
    return Molecule(), batch, regress


class Interaction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(4, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH))
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, features: Tensor, radial: Tensor) -> Tensor:
        messages = self.into(features)[:, None] * self.filter(radial)
        return features + torch.tanh(self.out(messages.mean(dim=2)))


class SchNet(nn.Module):
    """Distances are expanded once, and given to every interaction."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Embedding(6, WIDTH)
        self.interactions = nn.ModuleList(Interaction() for _ in range(3))
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, places: Tensor, kinds: Tensor) -> Tensor:
        apart = (places[:, :, None] - places[:, None]).square().sum(dim=-1, keepdim=True)
        radial = torch.exp(-(apart - torch.arange(4.0)).square())
        features = self.atoms(kinds)
        for layer in self.interactions:
            features = layer(features, radial)
        return self.energy(features).sum(dim=1)


@case("molecules")
def schnet() -> Made:
    batch = {"places": noise(ROWS, NODES, 3), "kinds": integers(6, ROWS, NODES)}
    return SchNet(), batch, regress


@case("molecules")
def schnet_forces() -> Made:
    """Its loss needs the gradient of the energy by the places."""

    class Forces(SchNet):
        def forward(self, places: Tensor, kinds: Tensor) -> Tensor:
            with torch.enable_grad():
                places = places.detach().requires_grad_()
                energy = super().forward(places, kinds)
                (force,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
            return force

    batch = {"places": noise(ROWS, NODES, 3), "kinds": integers(6, ROWS, NODES)}
    return Forces(), batch, regress


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)]
        self.phi = nn.Sequential(*layers)
        self.rho = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, members: Tensor) -> Tensor:
        return self.rho(self.phi(members).sum(dim=1))


@case("sets and points")
def deep_sets() -> Made:
    return DeepSets(), {"members": noise(ROWS, NODES, 3)}, classify


class Points(nn.Module):
    """PointNet: a network predicts the matrix by which points are turned."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.AdaptiveMaxPool1d(1))
        self.matrix = nn.Linear(8, 9)
        self.convs = nn.ModuleList(nn.Conv1d(a, b, 1) for a, b in ((3, 8), (8, 8), (8, 16)))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        matrix = self.matrix(self.turn(points.transpose(1, 2)).flatten(1)).unflatten(1, (3, 3))
        hidden = (points @ (matrix + torch.eye(3))).transpose(1, 2)
        for conv in self.convs:
            hidden = F.relu(conv(hidden))
        return self.head(hidden.amax(dim=2))


@case("sets and points")
def point_net() -> Made:
    return Points(), {"points": noise(ROWS, 7, 3)}, classify
