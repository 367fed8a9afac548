"""What torch itself offers: transformers, recurrent networks, containers at the root."""

import torch
from torch import Tensor, nn

from .case import (
    CLASSES,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Made,
    Supervised,
    case,
    classify,
    images,
    labels,
    noise,
    predict_words,
    reconstruct,
    regress,
    words,
)


def _layer(kind: type[nn.Module] = nn.TransformerEncoderLayer, **settings: bool) -> nn.Module:
    settings = {"batch_first": True, **settings}
    return kind(WIDTH, 2, dim_feedforward=16, dropout=0.0, **settings)


@case("nn.Transformer", "torch")
def nn_transformer_at_the_root() -> Made:
    """It calls its target `tgt`; encoder and decoder of two layers each."""
    model = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)
    return model, {"src": noise(ROWS, 5, WIDTH), "tgt": noise(ROWS, 4, WIDTH)}, regress


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 3, 3, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        made, read = self.embedding(target), self.embedding(source)
        return self.head(self.transformer(read, made, tgt_mask=mask, tgt_is_causal=True))


@case("nn.Transformer", "torch")
def nn_transformer_translator() -> Made:
    return Translator(), {"target": words(5), "source": words(7, seed=8)}, predict_words


@case("nn.TransformerEncoder", "torch")
def nn_transformer_encoder_at_the_root() -> Made:
    model = nn.TransformerEncoder(_layer(), 3, enable_nested_tensor=False)
    return model, {"src": noise(ROWS, LENGTH, WIDTH)}, regress


class CausalEncoder(nn.Module):
    """The language model of torch's tutorials: an encoder with a causal mask."""

    def __init__(self, *, padded: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(_layer(norm_first=not padded), 3)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.padded = padded

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        padding = None
        if self.padded:
            padding = torch.where(ids == 0, -1e9, 0.0)
            padding[:, 0] = 0.0
        hidden = self.encoder(self.embedding(ids), mask=mask, src_key_padding_mask=padding)
        return self.head(hidden)


@case("nn.TransformerEncoder", "torch")
def nn_transformer_encoder_causal() -> Made:
    return CausalEncoder(padded=False), {"ids": words()}, predict_words


@case("nn.TransformerEncoder", "torch")
def nn_transformer_encoder_padded() -> Made:
    return CausalEncoder(padded=True), {"ids": words()}, predict_words


class Describer(nn.Module):
    """A decoder that reads an image through cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer), 3)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, picture: Tensor) -> Tensor:
        memory = self.patches(picture).flatten(2).transpose(1, 2)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.decoder(self.embedding(ids), memory, tgt_mask=mask))


@case("nn.TransformerDecoder", "torch")
def nn_transformer_decoder_over_image() -> Made:
    return Describer(), {"ids": words(), "picture": images()}, predict_words


@case("nn.TransformerDecoder", "torch")
def nn_transformer_decoder_at_the_root() -> Made:
    model = nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer), 3)
    return model, {"tgt": noise(ROWS, 4, WIDTH), "memory": noise(ROWS, 5, WIDTH)}, regress


@case("nn.LSTM", "torch")
def nn_lstm_at_the_root() -> Made:
    """Its three layers are one module, its weights attributes by number."""
    model = nn.LSTM(WIDTH, WIDTH, num_layers=3, batch_first=True)
    return model, {"input": noise(ROWS, LENGTH, WIDTH)}, regress


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(ids))
        return self.head(hidden)


@case("nn.LSTM", "torch")
def nn_lstm_tagger() -> Made:
    return Tagger(), {"ids": words()}, predict_words


@case("nn.Sequential at the root", "torch")
def sequential_of_linears() -> Made:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    layers.append(nn.Linear(WIDTH, CLASSES))
    return nn.Sequential(*layers), {"input": noise(ROWS, WIDTH)}, classify


@case("nn.Sequential at the root", "torch")
def sequential_of_convolutions() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )
    return model, {"input": images()}, classify


@case("nn.Sequential at the root", "torch")
def sequential_of_sequentials() -> Made:
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    stages = [nn.Sequential(block(), block()) for _ in range(3)]
    return nn.Sequential(*stages), {"input": noise(ROWS, WIDTH)}, reconstruct


@case("nn.Sequential in a wrapper", "torch")
def sequential_with_labels() -> Made:
    """What one makes of a Sequential to give it labels."""
    layers = [nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()]
    model = Supervised(nn.Sequential(*layers, nn.Linear(16, CLASSES)))
    return model, {"inputs": noise(ROWS, WIDTH), "labels": labels()}, None


@case("nn.Sequential in a wrapper", "torch")
def sequential_of_alike_blocks() -> Made:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    model = Supervised(nn.Sequential(block(), block(), block()))
    return model, {"inputs": noise(ROWS, WIDTH), "labels": labels()}, None


class Named(nn.ModuleDict):
    """A ModuleDict that runs its entries in order."""

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.values():
            inputs = layer(inputs)
        return inputs


def _named(kind: type[nn.Module]) -> nn.Module:
    block = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    return kind({"stem": nn.Linear(WIDTH, WIDTH), "a": block[0], "b": block[1], "c": block[2]})


@case("nn.ModuleDict at the root", "torch")
def moduledict_at_the_root() -> Made:
    return _named(Named), {"inputs": noise(ROWS, WIDTH)}, reconstruct


class Holder(nn.Module):
    """Its layers are entries of a ModuleDict, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = _named(nn.ModuleDict)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.parts["stem"](inputs)
        for name in ("a", "b", "c"):
            hidden = hidden + self.parts[name](hidden)
        return hidden


@case("nn.ModuleDict at the root", "torch")
def moduledict_in_a_model() -> Made:
    return Holder(), {"inputs": noise(ROWS, WIDTH)}, reconstruct
