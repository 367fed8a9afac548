"""Own models with attention: transformers as researchers write them, of one tower and of two."""

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
    first,
    images,
    integers,
    noise,
    predict_words,
    regress,
    words,
)


class Attention(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, memory: Tensor, *, causal: bool = False) -> Tensor:
        given = [self.query(hidden), *self.both(memory).chunk(2, dim=-1)]
        parts = [one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in given]
        made = F.scaled_dot_product_attention(*parts, is_causal=causal)
        return self.out(made.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention to what came in, or to a memory too, and a perceptron."""

    def __init__(self, *, causal: bool = False, crosses: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.attention = Attention()
        self.cross = Attention() if crosses else None
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, hidden: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norms[0](hidden)
        hidden = hidden + self.attention(normed, normed, causal=self.causal)
        if self.cross is not None and memory is not None:
            hidden = hidden + self.cross(self.norms[1](hidden), memory)
        return hidden + self.down(F.gelu(self.up(self.norms[2](hidden))))


class GPT(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@case("GPT")
def own_gpt() -> Made:
    return GPT(tied=False), {"ids": words()}, predict_words


@case("GPT")
def own_gpt_with_tied_head() -> Made:
    return GPT(tied=True), {"ids": words()}, predict_words


@case("GPT")
def own_gpt_with_sum_and_weight() -> Made:
    """Its loss returns a sum and a weight: words that are not padding."""

    def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        targets = batch["ids"].roll(-1, dims=1)
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        counted = (targets != 0).flatten()
        return (losses * counted).sum(), counted.sum()

    return GPT(tied=False), {"ids": words(high=4)}, loss


class EncoderDecoder(nn.Module):
    """Two lists: all layers of the second read what the first one made."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(Block(causal=True, crosses=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        memory = self.words(source)
        for layer in self.encoder:
            memory = layer(memory)
        hidden = self.words(target)
        for layer in self.decoder:
            hidden = layer(hidden, memory)
        return self.head(hidden)


@case("encoder and decoder")
def own_encoder_decoder() -> Made:
    return EncoderDecoder(), {"target": words(4), "source": words(5, seed=8)}, predict_words


class SmallEncoder(EncoderDecoder):
    """The encoder is one nn.TransformerEncoder, smaller than a tenth of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH))


@case("encoder and decoder")
def own_encoder_decoder_with_a_small_encoder() -> Made:
    return SmallEncoder(), {"target": words(4), "source": words(5, seed=8)}, predict_words


class OwnPerceiver(nn.Module):
    """Latents look at the inputs, then at themselves; pairs of modules in a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, WIDTH))
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), Block()]) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.latents.expand(len(inputs), -1, -1)
        for cross, block in self.layers:
            hidden = block(hidden + cross(hidden, inputs))
        return self.head(hidden.mean(dim=1))


@case("Perceiver")
def own_perceiver() -> Made:
    return OwnPerceiver(), {"inputs": noise(ROWS, 7, WIDTH)}, classify


class Induced(nn.Module):
    """Attention to a set through a few points of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(2, WIDTH))
        self.there, self.back = Attention(), Attention()

    def forward(self, members: Tensor) -> Tensor:
        seen = self.there(self.points.expand(len(members), -1, -1), members)
        return members + self.back(members, seen)


class SetTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[Induced() for _ in range(3)])
        self.seed, self.pool = nn.Parameter(torch.randn(1, WIDTH)), Attention()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, members: Tensor) -> Tensor:
        members = self.encoder(members)
        pooled = self.pool(self.seed.expand(len(members), -1, -1), members)
        return self.head(pooled[:, 0])


@case("Set Transformer")
def set_transformer() -> Made:
    return SetTransformer(), {"members": noise(ROWS, 5, WIDTH)}, classify


class Skipping(nn.Module):
    """U-ViT: layers of the second half see what those of the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.ModuleList(Block() for _ in range(2))
        self.middle = Block()
        self.late = nn.ModuleList(Block() for _ in range(2))
        self.merge = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        skips, hidden = [], inputs
        for block in self.early:
            hidden = block(hidden)
            skips.append(hidden)
        hidden = self.middle(hidden)
        for block, merge in zip(self.late, self.merge, strict=True):
            hidden = block(merge(torch.cat([hidden, skips.pop()], dim=-1)))
        return hidden


@case("long skips")
def u_vit() -> Made:
    return Skipping(), {"inputs": noise(ROWS, LENGTH, WIDTH)}, regress


class Conditioned(nn.Module):
    """DiT's block: scale, shift and gate from a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.six = nn.Linear(WIDTH, 6 * WIDTH)
        self.attention, self.linear = Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        parts = self.six(F.silu(condition))[:, None].chunk(6, dim=-1)
        normed = self.norm(hidden) * (1 + parts[0]) + parts[1]
        hidden = hidden + parts[2] * self.attention(normed, normed)
        normed = self.norm(hidden) * (1 + parts[3]) + parts[4]
        return hidden + parts[5] * torch.tanh(self.linear(normed))


class OwnDiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.kinds = nn.Conv2d(3, WIDTH, 4, 4), nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Conditioned() for _ in range(3))
        self.last = nn.Linear(WIDTH, 48)

    def forward(self, noisy: Tensor, kinds: Tensor) -> Tensor:
        condition = self.kinds(kinds)
        hidden = self.patches(noisy).flatten(2).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden, condition)
        return F.fold(self.last(hidden).transpose(1, 2), noisy.shape[2:], 4, stride=4)


@case("DiT")
def own_dit() -> Made:
    return OwnDiT(), {"noisy": images(8), "kinds": integers(CLASSES, ROWS)}, regress


class Tower(nn.Module):
    def __init__(self, entrance: nn.Module) -> None:
        super().__init__()
        self.entrance, self.exit = entrance, nn.Linear(WIDTH, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entrance(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return F.normalize(self.exit(hidden.mean(dim=1)), dim=-1)


class TwoTowers(nn.Module):
    """CLIP: two lists that meet in the loss, which compares rows with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.image = Tower(nn.Linear(12, WIDTH))
        self.text = Tower(nn.Embedding(VOCABULARY, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, patches: Tensor, ids: Tensor) -> Tensor:
        return self.scale.exp() * self.image(patches) @ self.text(ids).T


def _diagonal(outputs: Tensor, _: Batch) -> Tensor:
    targets = torch.arange(len(outputs))
    return (F.cross_entropy(outputs, targets) + F.cross_entropy(outputs.T, targets)) / 2


@case("contrastive")
def two_towers() -> Made:
    return TwoTowers(), {"patches": noise(ROWS, 4, 12), "ids": words()}, _diagonal


class Siamese(nn.Module):
    """One tower that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(nn.Linear(12, WIDTH))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.tower(left) * self.tower(right)).sum(dim=-1, keepdim=True)


@case("siamese")
def siamese_called_twice() -> Made:
    batch = {"left": noise(ROWS, 4, 12), "right": noise(ROWS, 4, 12, seed=7)}
    return Siamese(), batch, regress


class Concatenated(Siamese):
    """Both sides pass the tower at once, as twice the rows."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        both = self.tower(torch.cat([left, right]))
        return (both[: len(left)] * both[len(left) :]).sum(dim=-1, keepdim=True)


@case("siamese")
def siamese_of_joined_rows() -> Made:
    batch = {"left": noise(ROWS, 4, 12), "right": noise(ROWS, 4, 12, seed=7)}
    return Concatenated(), batch, regress


class SelfSupervised(nn.Module):
    """SimCLR: one tower over two views, a loss over all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(nn.Linear(12, WIDTH))

    def forward(self, views: Tensor) -> Tensor:
        both = self.tower(views.flatten(0, 1)).unflatten(0, views.shape[:2])
        return both[:, 0] @ both[:, 1].T


@case("contrastive")
def simclr() -> Made:
    return SelfSupervised(), {"views": noise(ROWS, 2, 4, 12)}, _diagonal


class Streams(nn.Module):
    """A block of two streams that look at each other: it takes and returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Attention(), Attention()

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return image + self.left(image, text), text + self.right(text, image)


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Streams() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        text = self.words(ids)
        for block in self.blocks:
            image, text = block(image, text)
        return self.head(image.mean(dim=1) + text.mean(dim=1))


@case("two streams")
def two_streams() -> Made:
    batch = {"image": noise(ROWS, 4, WIDTH), "ids": words()}
    return TwoStreams(), batch, lambda o, b: classify(o, {"image": first(b)})


class Biased(nn.Module):
    """ALiBi: the mask is made once, and given to every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        query, key, value = self.all(hidden).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5 + bias
        return hidden + self.out(scores.softmax(dim=-1) @ value)


class Distances(nn.Module):
    """A learned bias by distance, of the model, that all layers add."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, 1)
        self.layers = nn.ModuleList(Biased() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        bias = self.bias((places[:, None] - places).abs())[..., 0]
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden, bias=bias)
        return self.head(hidden)


@case("relative positions")
def shared_relative_bias() -> Made:
    return Distances(), {"ids": words()}, predict_words
