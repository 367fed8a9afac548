"""Models of diffusers: transformers, U-Nets, autoencoders."""

from typing import Any

import torch

from .case import ROWS, Batch, Made, case, images, integers, noise, regress

GROUPS = 4  # of norms


def _made(kind: str, batch: Batch, **settings: Any) -> Made:
    import diffusers

    return getattr(diffusers, kind)(**settings), batch, regress


def _latents(size: int = 8, channels: int = 4) -> torch.Tensor:
    return noise(ROWS, channels, size, size)


def _times() -> torch.Tensor:
    return integers(1000, ROWS)


@case("DiT", "diffusers")
def diffusers_dit() -> Made:
    batch = {"hidden_states": _latents(), "timestep": _times(), "class_labels": integers(10, ROWS)}
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3, "sample_size": 8}
    return _made("DiTTransformer2DModel", batch, **sizes, num_embeds_ada_norm=10)


@case("PixArt", "diffusers")
def diffusers_pixart() -> Made:
    batch = {
        "hidden_states": _latents(),
        "encoder_hidden_states": noise(ROWS, 5, 12),
        "timestep": _times(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3, "sample_size": 8}
    widths = {"cross_attention_dim": 16, "caption_channels": 12}
    return _made("PixArtTransformer2DModel", batch, **sizes, **widths)


def _flux(places: torch.Tensor, others: torch.Tensor) -> Made:
    batch = {
        "hidden_states": noise(ROWS, 9, 4),
        "encoder_hidden_states": noise(ROWS, 5, 12),
        "pooled_projections": noise(ROWS, 6),
        "timestep": noise(ROWS).abs(),
        "img_ids": places,
        "txt_ids": others,
    }
    sizes = {"in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 8}
    widths = {"num_attention_heads": 2, "joint_attention_dim": 12, "pooled_projection_dim": 6}
    return _made("FluxTransformer2DModel", batch, **sizes, **widths, axes_dims_rope=(4, 2, 2))


def _places(number: int) -> torch.Tensor:
    return torch.arange(number).float()[:, None] * torch.tensor([0.0, 1.0, 0.0])


@case("Flux", "diffusers")
def diffusers_flux() -> Made:
    """Blocks of two streams, then blocks of one; places of tokens have no rows."""
    return _flux(_places(9), 0 * _places(5))


@case("Flux", "diffusers")
def diffusers_flux_places_with_rows() -> Made:
    """The same, with the places repeated for every row; the model looks at the first."""
    return _flux(_places(9).expand(ROWS, 9, 3).clone(), torch.zeros(ROWS, 5, 3))


@case("SD3", "diffusers")
def diffusers_sd3() -> Made:
    batch = {
        "hidden_states": _latents(),
        "encoder_hidden_states": noise(ROWS, 5, 12),
        "pooled_projections": noise(ROWS, 6),
        "timestep": _times(),
    }
    sizes = {"sample_size": 8, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8}
    widths = {"num_attention_heads": 2, "joint_attention_dim": 12, "caption_projection_dim": 16}
    places = {"pooled_projection_dim": 6, "out_channels": 4, "pos_embed_max_size": 8}
    return _made("SD3Transformer2DModel", batch, **sizes, **widths, **places)


@case("Sana", "diffusers")
def diffusers_sana() -> Made:
    batch = {
        "hidden_states": _latents(),
        "encoder_hidden_states": noise(ROWS, 5, 12),
        "timestep": _times(),
    }
    sizes = {"in_channels": 4, "out_channels": 4, "num_layers": 3, "sample_size": 8}
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_cross_attention_heads": 2}
    widths = {"cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 12}
    return _made("SanaTransformer2DModel", batch, **sizes, **heads, **widths)


@case("Wan", "diffusers")
def diffusers_wan() -> Made:
    """Video."""
    batch = {
        "hidden_states": noise(ROWS, 4, 2, 4, 4),
        "timestep": _times(),
        "encoder_hidden_states": noise(ROWS, 5, 12),
    }
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "num_layers": 3}
    widths = {"out_channels": 4, "text_dim": 12, "freq_dim": 8, "ffn_dim": 16}
    return _made("WanTransformer3DModel", batch, **sizes, **widths, rope_max_seq_len=16)


@case("diffusion prior", "diffusers")
def diffusers_prior() -> Made:
    batch = {
        "hidden_states": noise(ROWS, 12),
        "timestep": _times(),
        "proj_embedding": noise(ROWS, 12, seed=9),
        "encoder_hidden_states": noise(ROWS, 5, 12),
    }
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3}
    return _made("PriorTransformer", batch, **sizes, embedding_dim=12, num_embeddings=5)


_BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": GROUPS}


@case("diffusion U-Net", "diffusers")
def diffusers_unet_2d() -> Made:
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    batch = {"sample": images(16), "timestep": _times()}
    return _made("UNet2DModel", batch, sample_size=16, **blocks, **_BLOCKS, attention_head_dim=4)


@case("diffusion U-Net", "diffusers")
def diffusers_unet_2d_condition() -> Made:
    """The U-Net of Stable Diffusion."""
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    batch = {
        "sample": _latents(),
        "timestep": _times(),
        "encoder_hidden_states": noise(ROWS, 5, 12),
    }
    sizes = {"sample_size": 8, "cross_attention_dim": 12, "attention_head_dim": 4}
    return _made("UNet2DConditionModel", batch, **blocks, **sizes, **_BLOCKS)


@case("diffusion U-Net", "diffusers")
def diffusers_unet_1d() -> Made:
    batch = {"sample": noise(ROWS, 2, 32), "timestep": _times()}
    blocks = {
        "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"),
        "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip"),
    }
    sizes = {"sample_size": 32, "block_out_channels": (32, 32), "extra_in_channels": 64}
    return _made("UNet1DModel", batch, **blocks, **sizes)


@case("ControlNet", "diffusers")
def diffusers_controlnet() -> Made:
    """It returns a list of residuals, of all its blocks."""
    import diffusers

    model = diffusers.ControlNetModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=4,
        conditioning_embedding_out_channels=(4, 8),
        **_BLOCKS,
    )
    batch = {
        "sample": _latents(),
        "timestep": _times(),
        "encoder_hidden_states": noise(ROWS, 5, 12),
        "controlnet_cond": images(16),
    }

    def loss(outputs: Any, _: Batch) -> torch.Tensor:
        residuals = [*outputs.down_block_res_samples, outputs.mid_block_res_sample]
        return torch.stack([one.square().mean() for one in residuals]).mean()

    return model, batch, loss


@case("autoencoder", "diffusers")
def diffusers_autoencoder_kl() -> Made:
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    return _made("AutoencoderKL", {"sample": images(16)}, **blocks, **_BLOCKS, sample_size=16)


@case("VQ-VAE", "diffusers")
def diffusers_vq() -> Made:
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    sizes = {"sample_size": 16, "num_vq_embeddings": 16, "latent_channels": 4}
    return _made("VQModel", {"sample": images(16)}, **blocks, **_BLOCKS, **sizes)
