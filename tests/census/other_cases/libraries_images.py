"""Models of images: timm, torchvision, vit-pytorch, segmentation models, MONAI."""

from typing import Any

from torch import Tensor, nn

from .case import CLASSES, ROWS, Made, Supervised, case, classify, images, labels, noise, regress


def _timm(kind: str, *, size: int = 32, **settings: Any) -> Made:
    """A model of timm by the name of its class."""
    from timm import models

    for part in kind.split("."):
        models = getattr(models, part)
    return models(num_classes=CLASSES, **settings), {"x": images(size)}, classify


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}


@case("ViT", "timm")
def timm_vit() -> Made:
    return _timm("VisionTransformer", **_VIT)


@case("DeiT", "timm")
def timm_deit_distilled() -> Made:
    """Two heads: it returns a tuple in training."""
    model, batch, _ = _timm("deit.VisionTransformerDistilled", **_VIT)
    model.set_distilled_training(True)

    def loss(outputs: tuple[Tensor, Tensor], batch: dict[str, Any]) -> Tensor:
        return classify(outputs[0], batch) + 0.5 * classify(outputs[1], batch)

    return model, batch, loss


@case("BEiT", "timm")
def timm_beit() -> Made:
    return _timm("Beit", **_VIT)


@case("EVA-02", "timm")
def timm_eva() -> Made:
    return _timm("Eva", **_VIT, use_rot_pos_emb=True, swiglu_mlp=True)


@case("CaiT", "timm")
def timm_cait() -> Made:
    return _timm("Cait", **_VIT, depth_token_only=2)


@case("XCiT", "timm")
def timm_xcit() -> Made:
    return _timm("Xcit", **_VIT)


@case("Swin", "timm")
def timm_swin() -> Made:
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4}
    settings = {"embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2), "drop_path_rate": 0.0}
    return _timm("SwinTransformer", **sizes, **settings)


@case("Swin v2", "timm")
def timm_swin_v2() -> Made:
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4}
    settings = {"embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2), "drop_path_rate": 0.0}
    return _timm("SwinTransformerV2", **sizes, **settings)


@case("ConvNeXt", "timm")
def timm_convnext() -> Made:
    return _timm("ConvNeXt", depths=(1, 1, 3, 1), dims=(8, 8, 16, 16))


@case("ConvNeXt", "timm")
def timm_convnext_v2() -> Made:
    """With global response normalization."""
    return _timm("ConvNeXt", depths=(1, 1, 2, 1), dims=(8, 8, 16, 16), use_grn=True)


@case("MLP-Mixer", "timm")
def timm_mixer() -> Made:
    return _timm("MlpMixer", img_size=32, patch_size=8, num_blocks=3, embed_dim=16)


@case("gMLP", "timm")
def timm_gmlp() -> Made:
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import SpatialGatingBlock

    sizes = {"img_size": 32, "patch_size": 8, "num_blocks": 3, "embed_dim": 16, "mlp_ratio": 4}
    return _timm("MlpMixer", **sizes, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp)


@case("ResNet", "timm")
def timm_resnet() -> Made:
    from timm.models.resnet import BasicBlock

    return _timm("ResNet", size=64, block=BasicBlock, layers=(1, 2, 1, 1), channels=(8, 8, 16, 16))


@case("RegNet", "timm")
def timm_regnet() -> Made:
    from timm.models.regnet import RegNetCfg

    shape = RegNetCfg(depth=6, w0=8, wa=8.0, wm=2.0, group_size=8)
    return _timm("RegNet", size=64, cfg=shape)


@case("EfficientNet", "timm")
def timm_efficientnet() -> Made:
    from timm.models._efficientnet_builder import decode_arch_def

    stages = [["ds_r1_k3_s1_e1_c8"], ["ir_r2_k3_s2_e3_c8_se0.25"], ["ir_r3_k3_s2_e3_c16"]]
    sizes = {"stem_size": 8, "num_features": 32}
    return _timm("EfficientNet", block_args=decode_arch_def(stages), **sizes)


@case("MobileNetV3", "timm")
def timm_mobilenet() -> Made:
    import timm

    model = timm.create_model("mobilenetv3_small_050", num_classes=CLASSES, drop_rate=0.0)
    return model, {"x": images(64)}, classify


@case("PoolFormer", "timm")
def timm_poolformer() -> Made:
    return _timm("MetaFormer", depths=(2, 2, 2, 2), dims=(8, 8, 16, 16))


@case("Twins", "timm")
def timm_twins() -> Made:
    settings = {"embed_dims": (8, 16), "num_heads": (1, 2), "mlp_ratios": (2, 2)}
    shapes = {"depths": (2, 2), "sr_ratios": (2, 1), "wss": (4, 4), "patch_size": 2}
    return _timm("Twins", img_size=32, **settings, **shapes)


@case("Hiera", "timm")
def timm_hiera() -> Made:
    return _timm("Hiera", img_size=(64, 64), size=64, embed_dim=8, num_heads=1, stages=(1, 1, 2, 1))


@case("LeViT", "timm")
def timm_levit() -> Made:
    shape = {"embed_dim": (16, 24), "num_heads": (2, 3), "depth": (2, 2), "key_dim": 8}
    return _timm("Levit", img_size=128, size=128, **shape)


@case("labels that only the loss reads", "timm")
def timm_vit_with_labels_in_the_batch() -> Made:
    """The batch of a data loader, as it is: the model takes images, the loss the labels too."""
    model, batch, _ = _timm("VisionTransformer", **_VIT)

    def loss(outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["labels"])

    return model, {**batch, "labels": labels()}, loss


# --------------------------------------------------------------------------------------------------
# torchvision


def _torchvision(kind: str, *given: Any, size: int = 32, **settings: Any) -> Made:
    from torchvision import models

    for part in kind.split("."):
        models = getattr(models, part)
    model = Supervised(models(*given, num_classes=CLASSES, **settings))
    return model, {"inputs": images(size), "labels": labels()}, None


@case("ResNet", "torchvision")
def torchvision_resnet() -> Made:
    from torchvision.models.resnet import BasicBlock

    return _torchvision("ResNet", BasicBlock, [2, 1, 1, 1], size=64)


@case("DenseNet", "torchvision")
def torchvision_densenet() -> Made:
    sizes = {"growth_rate": 4, "block_config": (2, 3), "num_init_features": 8, "bn_size": 2}
    return _torchvision("DenseNet", **sizes)


@case("ViT", "torchvision")
def torchvision_vit() -> Made:
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 3, "num_heads": 2}
    return _torchvision("VisionTransformer", **sizes, hidden_dim=16, mlp_dim=32)


@case("Swin", "torchvision")
def torchvision_swin() -> Made:
    sizes = {"patch_size": [2, 2], "window_size": [4, 4], "stochastic_depth_prob": 0.0}
    return _torchvision("SwinTransformer", **sizes, embed_dim=8, depths=[2, 2], num_heads=[1, 2])


@case("ShuffleNet", "torchvision")
def torchvision_shufflenet() -> Made:
    return _torchvision("ShuffleNetV2", [2, 2, 1], [8, 16, 32, 64, 64], size=64)


@case("SqueezeNet", "torchvision")
def torchvision_squeezenet() -> Made:
    return _torchvision("SqueezeNet", "1_1", size=64, dropout=0.0)


# --------------------------------------------------------------------------------------------------
# vit-pytorch


@case("ViT", "vit_pytorch")
def vit_pytorch_simple_vit() -> Made:
    from vit_pytorch import SimpleViT

    sizes = {"image_size": 32, "patch_size": 8, "dim": 16, "depth": 3, "heads": 2, "mlp_dim": 32}
    return SimpleViT(**sizes, num_classes=CLASSES, dim_head=8), {"img": images(32)}, classify


@case("NesT", "vit_pytorch")
def vit_pytorch_nest() -> Made:
    from vit_pytorch.nest import NesT

    sizes = {"image_size": 32, "patch_size": 4, "dim": 8, "heads": 2, "num_hierarchies": 2}
    model = NesT(**sizes, block_repeats=(2, 2), num_classes=CLASSES)
    return model, {"img": images(32)}, classify


@case("CvT", "vit_pytorch")
def vit_pytorch_cvt() -> Made:
    from vit_pytorch.cvt import CvT

    model = CvT(
        num_classes=CLASSES, s1_emb_dim=8, s2_emb_dim=8, s2_depth=2, s3_emb_dim=16, s3_depth=2
    )
    return model, {"x": images(64)}, classify


@case("CrossViT", "vit_pytorch")
def vit_pytorch_cross_vit() -> Made:
    """Two branches of different resolution that look at each other."""
    from vit_pytorch.cross_vit import CrossViT

    shape = {"image_size": 32, "num_classes": CLASSES, "sm_dim": 8, "lg_dim": 16, "depth": 2}
    small = {"sm_patch_size": 8, "sm_enc_depth": 1, "sm_enc_heads": 2, "sm_enc_mlp_dim": 16}
    large = {"lg_patch_size": 16, "lg_enc_depth": 2, "lg_enc_heads": 2, "lg_enc_mlp_dim": 16}
    both = {"cross_attn_depth": 1, "cross_attn_heads": 2, "cross_attn_dim_head": 8}
    model = CrossViT(**shape, **small, **large, **both, dropout=0.0, emb_dropout=0.0)
    return model, {"img": images(32)}, classify


@case("MLP-Mixer", "mlp_mixer_pytorch")
def mlp_mixer_pytorch() -> Made:
    """A Sequential at the root."""
    from mlp_mixer_pytorch import MLPMixer

    sizes = {"image_size": 32, "channels": 3, "patch_size": 8, "dim": 16, "depth": 3}
    return MLPMixer(**sizes, num_classes=CLASSES), {"input": images(32)}, classify


# --------------------------------------------------------------------------------------------------
# Segmentation


def _segmentation(kind: str, **settings: Any) -> Made:
    import segmentation_models_pytorch as smp

    model = getattr(smp, kind)("resnet18", encoder_weights=None, classes=2, **settings)
    return model, {"x": images(64)}, regress


@case("U-Net, 2-D", "segmentation_models_pytorch")
def smp_unet() -> Made:
    return _segmentation("Unet", encoder_depth=3, decoder_channels=(16, 8, 8))


@case("FPN", "segmentation_models_pytorch")
def smp_fpn() -> Made:
    settings = {"decoder_pyramid_channels": 8, "decoder_segmentation_channels": 32}
    return _segmentation("FPN", **settings, decoder_dropout=0.0)


@case("SegFormer", "segmentation_models_pytorch")
def smp_segformer() -> Made:
    return _segmentation("Segformer", decoder_segmentation_channels=8)


@case("U-Net, 2-D", "monai")
def monai_unet() -> Made:
    """A U-Net as a module in a module: skips are made by its shape."""
    from monai.networks.nets import UNet

    model = UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1)
    return model, {"x": noise(ROWS, 1, 16, 16)}, regress


@case("UNETR", "monai")
def monai_unetr() -> Made:
    """A transformer whose third, sixth and ninth layers a decoder reads."""
    from monai.networks.nets import UNETR

    sizes = {"feature_size": 4, "hidden_size": 16, "mlp_dim": 32, "num_heads": 2}
    model = UNETR(1, 2, (32, 32), **sizes, spatial_dims=2)
    return model, {"x_in": noise(ROWS, 1, 32, 32)}, regress


@case("deep supervision", "monai")
def monai_dynunet() -> Made:
    """In training it returns its result in several resolutions."""
    from monai.networks.nets import DynUNet

    shape = {"kernel_size": [3, 3, 3, 3], "strides": [1, 2, 2, 2], "filters": [4, 8, 8, 8]}
    model = DynUNet(
        2, 1, 2, **shape, upsample_kernel_size=[2, 2, 2], deep_supervision=True, deep_supr_num=2
    )
    return model, {"x": noise(ROWS, 1, 16, 16)}, lambda outputs, _: outputs.square().mean()
