"""Own models with something that a way of cutting might miss: shapes, side effects, data."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import (
    CLASSES,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Batch,
    Made,
    case,
    classify,
    images,
    integers,
    labels,
    noise,
    predict_words,
    reconstruct,
    regress,
    words,
)
from .own_feedforward import Residual


class Stack(nn.Module):
    """Layers in a list, in order, and a head."""

    def __init__(self, *layers: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or [Residual() for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES) if head is None else head

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def vectors() -> Batch:
    return {"inputs": noise(ROWS, WIDTH)}


# --------------------------------------------------------------------------------------------------
# Hidden states that change their shape


@case("hidden states that change")
def pictures_that_shrink() -> Made:
    """Every layer halves the picture; the channels stay, so any layer runs on any picture."""
    layers = [nn.Sequential(nn.Conv2d(3, 3, 3, 2, padding=1), nn.ReLU()) for _ in range(3)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))
    return Stack(*layers, head=head), {"inputs": images()}, classify


class Merging(nn.Module):
    """Token merging: pairs of neighbours become one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inner(hidden)
        return (hidden[:, ::2] + hidden[:, 1::2]) / 2


@case("hidden states that change")
def tokens_that_are_merged() -> Made:
    class Model(Stack):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs).mean(dim=1)

    return Model(*[Merging() for _ in range(3)]), {"inputs": noise(ROWS, 8, WIDTH)}, classify


@case("hidden states that change")
def wide_and_narrow_in_turns() -> Made:
    pairs = [(WIDTH, 16), (16, WIDTH)] * 2
    return Stack(*[nn.Linear(*pair) for pair in pairs]), vectors(), classify


@case("rows that see each other")
def centred_by_the_mean_of_the_batch() -> Made:
    """The mean of all rows is taken from each before the layers."""

    class Model(Stack):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs - inputs.mean(dim=0))

    return Model(), vectors(), classify


class AcrossRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.all(hidden).chunk(3, dim=-1)
        return hidden + (query @ key.T).softmax(dim=-1) @ value


@case("rows that see each other")
def attention_between_rows() -> Made:
    """Rows attend to each other in every layer, as in non-parametric transformers."""
    return Stack(*[AcrossRows() for _ in range(3)]), vectors(), classify


@case("upsampling")
def pictures_that_grow() -> Made:
    """A decoder, every layer of which doubles the picture."""
    layers = [nn.Sequential(nn.ConvTranspose2d(3, 3, 2, 2), nn.Tanh()) for _ in range(3)]
    return Stack(*layers, head=nn.Conv2d(3, 1, 1)), {"inputs": images(4)}, regress


@case("words enter the list")
def embedding_is_the_first_layer() -> Made:
    layers = [nn.Embedding(VOCABULARY, WIDTH), Residual(), Residual()]
    return Stack(*layers, head=nn.Linear(WIDTH, VOCABULARY)), {"inputs": words()}, predict_words


@case("words enter the list")
def everything_is_in_the_list() -> Made:
    """From words to logits: the list is the model."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Embedding(VOCABULARY, WIDTH),
                Residual(),
                Residual(),
                nn.Linear(WIDTH, VOCABULARY),
            )

        def forward(self, ids: Tensor) -> Tensor:
            return self.net(ids)

    return Model(), {"ids": words()}, predict_words


class Dicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden": self.inner(state["hidden"])}


@case("layers of dicts")
def layers_that_take_and_return_dicts() -> Made:
    class Model(Stack):
        def forward(self, inputs: Tensor) -> Tensor:
            state = {"hidden": inputs}
            for layer in self.layers:
                state = layer(state)
            return self.head(state["hidden"])

    return Model(*[Dicts() for _ in range(3)]), vectors(), classify


# --------------------------------------------------------------------------------------------------
# What models do besides


@case("hooks and side effects")
def features_caught_by_hooks() -> Made:
    """The loss reads what hooks of two layers have caught."""
    model, caught = Stack(), {}
    for index in (0, 1):
        name = str(index)
        model.layers[index].register_forward_hook(
            lambda module, given, made, name=name: caught.__setitem__(name, made)
        )

    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        return classify(outputs, batch) + sum(one.square().mean() for one in caught.values())

    return model, vectors(), loss


@case("hooks and side effects")
def features_kept_by_the_model() -> Made:
    """The model keeps the hidden state before and after its layers; the loss reads them there."""

    class Model(Stack):
        def forward(self, inputs: Tensor) -> Tensor:
            self.kept = [inputs]
            for layer in self.layers:
                inputs = layer(inputs)
            self.kept.append(inputs)
            return self.head(inputs)

    model = Model()

    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        return classify(outputs, batch) + F.mse_loss(model.kept[1], model.kept[0])

    return model, vectors(), loss


@case("hooks and side effects")
def momentum_teacher() -> Made:
    """Each training pass moves a teacher of the head towards the head."""

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            if self.training:
                with torch.no_grad():
                    pairs = zip(self.teacher.parameters(), self.head.parameters(), strict=True)
                    for slow, fast in pairs:
                        slow.lerp_(fast, 0.1)
            made = super().forward(inputs)
            return {"loss": F.mse_loss(made, self.teacher(inputs))}

    return Model(), vectors(), None


@case("losses beyond outputs")
def gradient_penalty() -> Made:
    """The loss differentiates the model by its inputs."""
    inputs = noise(ROWS, WIDTH).requires_grad_()

    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        (slope,) = torch.autograd.grad(outputs.sum(), batch["inputs"], create_graph=True)
        return classify(outputs, {"inputs": batch["inputs"].detach()}) + slope.square().mean()

    return Stack(), {"inputs": inputs}, loss


@case("losses beyond outputs")
def penalty_on_weights() -> Made:
    model = Stack()

    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        return classify(outputs, batch) + 0.01 * model.layers[0].up.weight.abs().sum()

    return model, vectors(), loss


@case("losses beyond outputs")
def learned_weights_of_losses() -> Made:
    """Two tasks, weighed by parameters of the model."""

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.spread = nn.Linear(WIDTH, 1), nn.Parameter(torch.zeros(2))

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            hidden = inputs
            for layer in self.layers:
                hidden = layer(hidden)
            losses = F.cross_entropy(self.head(hidden), labels), self.value(hidden).square().mean()
            weighed = (torch.stack(losses) * torch.exp(-self.spread) + self.spread).sum()
            return {"loss": weighed}

    return Model(), {**vectors(), "labels": labels()}, None


# --------------------------------------------------------------------------------------------------
# Kinds of data


class Spectral(nn.Module):
    """A Fourier neural operator's layer: complex weights for the lowest waves."""

    def __init__(self, modes: int = 3) -> None:
        super().__init__()
        weight = torch.randn(modes, WIDTH, WIDTH, dtype=torch.cfloat) / WIDTH
        self.weight, self.local = nn.Parameter(weight), nn.Linear(WIDTH, WIDTH)

    def forward(self, field: Tensor) -> Tensor:
        waves = torch.fft.rfft(field, dim=1)
        kept = torch.einsum("bmi,mio->bmo", waves[:, : len(self.weight)], self.weight)
        padded = F.pad(kept, (0, 0, 0, waves.shape[1] - kept.shape[1]))
        return F.gelu(torch.fft.irfft(padded, field.shape[1], dim=1) + self.local(field))


@case("kinds of numbers")
def fourier_neural_operator() -> Made:
    layers = [Spectral() for _ in range(3)]
    return Stack(*layers), {"inputs": noise(ROWS, 8, WIDTH)}, regress


@case("kinds of numbers")
def model_in_double_precision() -> Made:
    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.square().mean()

    return Stack().double(), {"inputs": noise(ROWS, WIDTH).double()}, loss


@case("kinds of numbers")
def sparse_gradient_of_a_table() -> Made:
    class Model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(self.table(ids).mean(dim=1))

    return Model(), {"ids": words()}, regress


@case("kinds of batches")
def inputs_in_a_dict() -> Made:
    """An entry of the batch is a dict of tensors."""

    class Model(Stack):
        def forward(self, x: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
            made = super().forward(x["left"] * x["right"])
            return {"loss": F.cross_entropy(made, labels)}

    both = {"left": noise(ROWS, WIDTH), "right": noise(ROWS, WIDTH, seed=7)}
    return Model(), {"x": both, "labels": labels()}, None


@case("kinds of batches")
def rows_of_several_lengths() -> Made:
    """Packed sequences: lengths are in the batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(VOCABULARY, WIDTH)
            self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.layers = nn.ModuleList(Residual() for _ in range(3))
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                self.words(ids), lengths, batch_first=True, enforce_sorted=False
            )
            hidden = self.gru(packed)[1][0]
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(hidden)

    return Model(), {"ids": words(), "lengths": integers(LENGTH, ROWS) + 1}, classify


@case("kinds of batches")
def mask_without_rows() -> Made:
    """A mask of positions, for all rows."""

    class Model(Stack):
        def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
            return super().forward(inputs * mask[:, None])

    batch = {"inputs": noise(ROWS, LENGTH, WIDTH), "mask": torch.arange(LENGTH) % 2.0}
    return Model(), batch, regress


class Answer(NamedTuple):
    loss: Tensor
    logits: Tensor


@case("kinds of outputs")
def named_tuple_with_a_loss() -> Made:
    class Model(Stack):
        def forward(self, inputs: Tensor, labels: Tensor) -> Answer:
            logits = super().forward(inputs)
            return Answer(F.cross_entropy(logits, labels), logits)

    return Model(), {**vectors(), "labels": labels()}, lambda outputs, _: outputs.loss


@case("kinds of outputs")
def other_outputs_in_training() -> Made:
    """Logits and features in training, logits alone otherwise."""

    class Model(Stack):
        def forward(self, inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            for layer in self.layers:
                inputs = layer(inputs)
            logits = self.head(inputs)
            return (logits, inputs) if self.training else logits

    def loss(outputs: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        logits, features = outputs
        return classify(logits, batch) + 0.1 * features.square().mean()

    return Model(), vectors(), loss


# --------------------------------------------------------------------------------------------------
# Models that were made into something else


@case("transformed models")
def graph_module() -> Made:
    """torch.fx has written its forward."""
    return torch.fx.symbolic_trace(Stack()), vectors(), classify


@case("transformed models")
def scripted_model() -> Made:
    return torch.jit.trace(Stack(), noise(1, WIDTH)), vectors(), classify


@case("transformed models")
def data_parallel() -> Made:
    return nn.DataParallel(Stack()), vectors(), classify


@case("layers under settings")
def layers_under_autocast() -> Made:
    class Model(Stack):
        def forward(self, inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(inputs).float()

    return Model(), vectors(), classify


@case("layers under settings")
def frozen_layers() -> Made:
    model = Stack()
    model.layers[:2].requires_grad_(False)
    return model, vectors(), classify


@case("layers under settings")
def layers_in_half_precision_of_their_own() -> Made:
    """Two of its layers hold bfloat16."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH).bfloat16()

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + torch.tanh(self.inner(hidden.bfloat16()).float())

    return Stack(Residual(), Cast(), Cast()), vectors(), reconstruct_head


def reconstruct_head(outputs: Tensor, batch: Batch) -> Tensor:
    return reconstruct(outputs, {"inputs": batch["inputs"][:, :CLASSES]})
