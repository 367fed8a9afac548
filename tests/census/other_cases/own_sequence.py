"""Own models of sequences: recurrent ones, state spaces, linear attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import (
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Made,
    case,
    noise,
    predict_words,
    regress,
    words,
)


class Language(nn.Module):
    """Words, layers that take and give a hidden state, words."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class ResidualGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gru(hidden)[0]


@case("GRU stack")
def gru_stack_of_residual_layers() -> Made:
    return Language(*[ResidualGRU() for _ in range(3)]), {"ids": words()}, predict_words


class BareGRUs(Language):
    """A list of nn.GRU, each of which returns its output and its state."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return self.head(self.norm(hidden))


@case("GRU stack")
def gru_stack_of_bare_layers() -> Made:
    layers = [nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(3)]
    return BareGRUs(*layers), {"ids": words()}, predict_words


class Cells(nn.Module):
    """LSTM cells in a list: a loop over time around a loop over layers."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(WIDTH, WIDTH) for _ in range(2))

    def forward(self, series: Tensor) -> Tensor:
        zero = series.new_zeros(len(series), WIDTH)
        states, made = [(zero, zero) for _ in self.cells], []
        for now in series.unbind(dim=1):
            for index, cell in enumerate(self.cells):
                states[index] = cell(now, states[index])
                now = states[index][0]
            made.append(now)
        return torch.stack(made, dim=1)


@case("recurrent cells")
def lstm_cells_over_time() -> Made:
    return Cells(), {"series": noise(ROWS, LENGTH, WIDTH)}, regress


class Attending(nn.Module):
    """Sequence to sequence with additive attention, word by word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
        self.keys, self.query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.energy, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        memory, state = self.encoder(self.embedding(source))
        state, keys, made = state[0], self.keys(memory), []
        for word in self.embedding(target).unbind(dim=1):
            energies = self.energy(torch.tanh(keys + self.query(state)[:, None]))
            context = (energies.softmax(dim=1) * memory).sum(dim=1)
            state = self.cell(torch.cat([word, context], dim=1), state)
            made.append(self.head(state))
        return torch.stack(made, dim=1)


@case("recurrent cells")
def seq2seq_with_attention() -> Made:
    return Attending(), {"target": words(4), "source": words(5, seed=8)}, predict_words


class Diagonal(nn.Module):
    """A diagonal state space (S4D), as a convolution by its kernel."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(WIDTH, states))
        self.angle = nn.Parameter(torch.arange(states).float().expand(WIDTH, states).clone())
        self.read = nn.Parameter(torch.randn(WIDTH, states, 2) / 4)
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        rate = torch.complex(-self.decay.exp(), self.angle)
        powers = torch.exp(rate[..., None] * torch.arange(length))
        kernel = (torch.view_as_complex(self.read)[..., None] * powers).sum(dim=1).real
        series = self.norm(hidden).transpose(1, 2)
        product = torch.fft.rfft(series, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        made = torch.fft.irfft(product, 2 * length)[..., :length]
        return hidden + self.mix(F.gelu(made.transpose(1, 2)))


@case("state space")
def s4d() -> Made:
    return Language(*[Diagonal() for _ in range(3)]), {"ids": words()}, predict_words


class Selective(nn.Module):
    """A selective scan (Mamba), step by step."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.norm, self.both = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.step, self.maps = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * states)
        self.decay = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(WIDTH, 1))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        series, gate = self.both(self.norm(hidden)).chunk(2, dim=-1)
        series = F.silu(self.conv(series.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2))
        step, (into, outof) = F.softplus(self.step(series)), self.maps(series).chunk(2, dim=-1)
        state, made = series.new_zeros(*series.shape[::2], into.shape[-1]), []
        for t in range(hidden.shape[1]):
            kept = torch.exp(-step[:, t, :, None] * self.decay.exp())
            state = kept * state + (step[:, t] * series[:, t])[..., None] * into[:, t, None]
            made.append((state * outof[:, t, None]).sum(dim=-1))
        return hidden + self.out(torch.stack(made, dim=1) * F.silu(gate))


@case("state space")
def mamba() -> Made:
    return Language(*[Selective() for _ in range(3)]), {"ids": words()}, predict_words


class MinimalGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.made = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        share, made = torch.sigmoid(self.gate(hidden)), self.made(hidden)
        kept = torch.cumsum(torch.log1p(-share * 0.99), dim=1)
        states = torch.exp(kept) * torch.cumsum(share * made * torch.exp(-kept), dim=1)
        return hidden + states


@case("state space")
def min_gru() -> Made:
    return Language(*[MinimalGRU() for _ in range(3)]), {"ids": words()}, predict_words


class TimeMixing(nn.Module):
    """RWKV's block: what was one word before, and weights that decay with time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.share = nn.LayerNorm(WIDTH), nn.Parameter(torch.rand(3, WIDTH))
        self.decay, self.bonus = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.parts = nn.ModuleDict(
            {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("k", "v", "r", "out")}
        )

    def forward(self, hidden: Tensor) -> Tensor:
        now = self.norm(hidden)
        before = F.pad(now, (0, 0, 1, -1))
        mixed = [share * now + (1 - share) * before for share in self.share]
        pairs = zip(("k", "v", "r"), mixed, strict=True)
        key, value, receptance = (self.parts[name](one) for name, one in pairs)
        above = below = torch.zeros_like(now[:, 0])
        made, decay = [], torch.exp(-torch.exp(self.decay))
        for t in range(now.shape[1]):
            own, weight = torch.exp(self.bonus + key[:, t]), torch.exp(key[:, t])
            made.append((above + own * value[:, t]) / (below + own))
            above, below = decay * above + weight * value[:, t], decay * below + weight
        out = torch.sigmoid(receptance) * torch.stack(made, dim=1)
        return hidden + self.parts["out"](out)


@case("linear attention")
def rwkv() -> Made:
    return Language(*[TimeMixing() for _ in range(3)]), {"ids": words()}, predict_words


class Retention(nn.Module):
    """Attention without softmax, with a decay of its own for every layer."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay, self.norm = decay, nn.LayerNorm(WIDTH)
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.all(self.norm(hidden)).chunk(3, dim=-1)
        places = torch.arange(hidden.shape[1])
        apart = places[:, None] - places
        weights = torch.where(apart >= 0, self.decay**apart, 0.0)
        return hidden + self.out((query @ key.transpose(1, 2) * weights) @ value)


@case("linear attention")
def retention() -> Made:
    layers = [Retention(decay) for decay in (0.5, 0.75, 0.9)]
    return Language(*layers), {"ids": words()}, predict_words


class Tokens(Language):
    """Truncated backpropagation: a state from before goes in, per layer, and does not come out."""

    def forward(self, ids: Tensor, states: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, states[:, index][None].contiguous())[0]
        return self.head(self.norm(hidden))


@case("GRU stack")
def gru_stack_with_initial_states() -> Made:
    layers = [nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(3)]
    return Tokens(*layers), {"ids": words(), "states": noise(ROWS, 3, WIDTH)}, predict_words
