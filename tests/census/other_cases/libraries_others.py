"""x-transformers, performers, perceivers, graphs of PyTorch Geometric, CLIP, adapters of PEFT."""

from typing import Any

import torch
from torch import Tensor, nn

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
    noise,
    predict_words,
    regress,
    words,
)

SHAPE = {"dim": 16, "depth": 3, "heads": 2, "attn_dim_head": 8}


@case("x-transformers", "x_transformers")
def x_transformers_decoder() -> Made:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(**SHAPE, rotary_pos_emb=True)
    model = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers)
    return model, {"x": words()}, predict_words


@case("x-transformers", "x_transformers")
def x_transformers_vit() -> Made:
    from x_transformers import Encoder, ViTransformerWrapper

    sizes = {"image_size": 32, "patch_size": 8, "num_classes": CLASSES}
    return (
        ViTransformerWrapper(**sizes, attn_layers=Encoder(**SHAPE)),
        {"img": images(32)},
        classify,
    )


@case("x-transformers", "x_transformers")
def x_transformers_encoder_decoder() -> Made:
    """The model's own loss."""
    from x_transformers import XTransformer

    parts = {}
    for part in ("enc", "dec"):
        parts |= {f"{part}_{name}": value for name, value in SHAPE.items()}
        parts |= {f"{part}_num_tokens": VOCABULARY, f"{part}_max_seq_len": 16}
    parts = {
        name.replace("enc_dim", "dim"): one for name, one in parts.items() if name != "dec_dim"
    }
    model = XTransformer(**parts)
    batch = {"src": words(high=VOCABULARY), "tgt": words(5, seed=8)}
    return model, batch, lambda outputs, _: outputs


@case("Performer", "performer_pytorch")
def performer_lm() -> Made:
    from performer_pytorch import PerformerLM

    sizes = {"num_tokens": VOCABULARY, "max_seq_len": 16, "dim": 16, "depth": 3, "heads": 2}
    return PerformerLM(**sizes, dim_head=8, nb_features=4), {"x": words()}, predict_words


@case("Performer", "performer_pytorch")
def performer_reversible() -> Made:
    """Reversible blocks with an autograd function of their own."""
    from performer_pytorch import PerformerLM

    sizes = {"num_tokens": VOCABULARY, "max_seq_len": 16, "dim": 16, "depth": 3, "heads": 2}
    model = PerformerLM(**sizes, dim_head=8, nb_features=4, reversible=True)
    return model, {"x": words()}, predict_words


@case("local attention", "local_attention")
def local_transformer() -> Made:
    from local_attention import LocalTransformer

    sizes = {"num_tokens": VOCABULARY, "dim": 16, "depth": 3, "max_seq_len": 16, "heads": 2}
    model = LocalTransformer(**sizes, dim_head=8, causal=True, local_attn_window_size=4)
    return model, {"x": words(8)}, predict_words


@case("Perceiver", "perceiver_pytorch")
def perceiver() -> Made:
    from perceiver_pytorch import Perceiver

    sizes = {"num_freq_bands": 2, "depth": 3, "max_freq": 4.0, "num_latents": 4, "latent_dim": 16}
    heads = {"cross_dim_head": 8, "latent_heads": 2, "latent_dim_head": 8}
    model = Perceiver(**sizes, **heads, num_classes=CLASSES)
    return model, {"data": images(8).movedim(1, -1)}, classify


@case("Perceiver", "perceiver_pytorch")
def perceiver_io() -> Made:
    from perceiver_pytorch import PerceiverIO

    sizes = {"depth": 3, "dim": 8, "queries_dim": 8, "logits_dim": CLASSES, "num_latents": 4}
    heads = {"latent_dim": 16, "cross_dim_head": 8, "latent_heads": 2, "latent_dim_head": 8}
    batch = {"data": noise(ROWS, 6, 8), "queries": noise(ROWS, 3, 8)}
    return PerceiverIO(**sizes, **heads), batch, regress


@case("TCN", "pytorch_tcn")
def pytorch_tcn() -> Made:
    """Convolutions with weight norm."""
    from pytorch_tcn import TCN

    model = TCN(3, [8, 8, 8], kernel_size=3, dropout=0.0, use_skip_connections=True)
    return model, {"x": noise(ROWS, 3, 16)}, regress


# --------------------------------------------------------------------------------------------------
# Graphs


def _ring(number: int) -> Tensor:
    ahead = torch.stack([torch.arange(number), (torch.arange(number) + 1) % number])
    return torch.cat([ahead, ahead.flip(0)], dim=1)


@case("graph convolutions", "torch_geometric")
def geometric_gcn() -> Made:
    """Nodes are rows; edges are not."""
    from torch_geometric.nn.models import GCN

    return GCN(8, 16, num_layers=3), {"x": noise(10, 8), "edge_index": _ring(10)}, regress


@case("graph U-Net", "torch_geometric")
def geometric_graph_unet() -> Made:
    from torch_geometric.nn.models import GraphUNet

    batch = {"x": noise(10, 8), "edge_index": _ring(10)}
    return GraphUNet(8, 16, CLASSES, depth=2), batch, regress


class OneGraph(nn.Module):
    """Rows are features of the nodes of one graph, whose edges are a buffer."""

    def __init__(self) -> None:
        from torch_geometric.nn import DeepGCNLayer, GENConv

        super().__init__()
        self.encoder = nn.Linear(4, 16)
        self.layers = nn.ModuleList(
            DeepGCNLayer(GENConv(16, 16, num_layers=1, norm="layer"), nn.LayerNorm(16), nn.ReLU())
            for _ in range(3)
        )
        self.head = nn.Linear(16, 2)
        self.register_buffer("edge_index", _ring(5))

    def forward(self, features: Tensor) -> Tensor:
        rows, nodes, _ = features.shape
        starts = torch.arange(rows)[:, None] * nodes
        edges = (self.edge_index[:, None] + starts).flatten(1)
        hidden = self.encoder(features.flatten(0, 1))
        for layer in self.layers:
            hidden = layer(hidden, edges)
        return self.head(hidden).unflatten(0, (rows, nodes))


@case("graph convolutions", "torch_geometric")
def geometric_deep_gcn_on_one_graph() -> Made:
    return OneGraph(), {"features": noise(ROWS, 5, 4)}, regress


# --------------------------------------------------------------------------------------------------
# Images and texts


def _contrastive(outputs: Any, _: Batch) -> Tensor:
    image, text, scale = outputs[:3]
    logits = scale * image @ text.T
    targets = torch.arange(len(logits))
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2


_VISION = {"layers": 3, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 32}
_TEXT = {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 3}


@case("CLIP", "open_clip")
def open_clip() -> Made:
    from open_clip import CLIP

    batch = {"image": images(32), "text": words(8, high=20)}
    return CLIP(12, _VISION, _TEXT), batch, _contrastive


@case("CoCa", "open_clip")
def open_clip_coca() -> Made:
    from open_clip import CoCa

    vision = {**_VISION, "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    text = {**_TEXT, "context_length": 8, "embed_cls": True, "output_tokens": True}
    decoder = {"context_length": 8, "vocab_size": 20, "width": 16, "heads": 2, "layers": 2}
    model = CoCa(16, decoder, text, vision)
    nn.init.normal_(model.text_decoder.text_projection, std=0.25)  # it leaves this uninitialized

    def loss(outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        logits, targets = outputs["logits"], outputs["labels"]
        captions = nn.functional.cross_entropy(logits.transpose(1, 2), targets)
        both = outputs["image_features"], outputs["text_features"], outputs["logit_scale"]
        return _contrastive(both, batch) + captions

    return model, {"image": images(32), "text": integers(19, ROWS, 8) + 1}, loss


# --------------------------------------------------------------------------------------------------
# Adapters


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def _adapted(config: Any) -> Made:
    import peft

    model = peft.get_peft_model(Stack(), config, autocast_adapter_dtype=False)
    return model, {"inputs": noise(ROWS, WIDTH)}, classify


@case("adapters", "peft")
def peft_lora_of_an_own_model() -> Made:
    import peft

    return _adapted(peft.LoraConfig(r=2, target_modules=["up", "down"], modules_to_save=["head"]))


@case("adapters", "peft")
def peft_ia3_of_an_own_model() -> Made:
    import peft

    return _adapted(peft.IA3Config(target_modules=["up", "down"], feedforward_modules=["down"]))


@case("nn.GRU over words", "torch")
def gru_language_model_with_tied_head() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.gru = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.gru(self.embedding(ids))[0])

    return Model(), {"ids": words(LENGTH)}, predict_words
