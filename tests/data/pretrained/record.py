"""Record the weights and outputs of narrow PyTorch models, for tests that load them into Flax models.

Run this script next to its files, with packages that the tests do not need:
`pip install torch==2.14.1 torchvision==0.29.1 timm==1.0.31 safetensors`, then `python record.py`.

Each model gives two files: `NAME.safetensors` with its `state_dict`, and `NAME_values.safetensors` with `image` (the
input, NCHW), `output` (of the model in evaluation mode) and, for the ViT, `pos_embed_6x6` (timm's own bicubic resizing).
"""

import pathlib

import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from torchvision.models.resnet import BasicBlock, ResNet

HERE = pathlib.Path(__file__).parent
NARROWER = 16  # the ratio of torchvision's widths to those recorded here


class NarrowResNet(ResNet):
    """ResNet-18 of torchvision with all widths divided, which its constructor has no argument for."""

    def __init__(self, num_classes):
        super().__init__(BasicBlock, [2, 2, 2, 2])
        width = 64 // NARROWER
        self.conv1 = torch.nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(width)
        self.fc = torch.nn.Linear(512 // NARROWER, num_classes)

    def _make_layer(self, block, planes, blocks, stride=1, dilate=False):
        if planes == 64:
            self.inplanes = 64 // NARROWER
        return super()._make_layer(block, planes // NARROWER, blocks, stride, dilate)


def randomize(model):
    """Fill norms, their statistics and all biases with random values: their defaults would hide a missing one."""
    for name, value in model.state_dict().items():
        if name.endswith(("running_var", "bn1.weight", "bn2.weight")) or (".norm" in name and value.ndim == 1):
            value.uniform_(0.5, 1.5)
        elif name.endswith(("bias", "running_mean")):
            value.normal_(std=0.3)


def record(name, model, image, **values):
    """Write the weights of a model, and its output for `image`."""
    model.eval()
    with torch.no_grad():
        output = model(image)
    save_file(model.state_dict(), HERE / f"{name}.safetensors")
    save_file({"image": image, "output": output, **values}, HERE / f"{name}_values.safetensors")


def main():
    """Record both models."""
    torch.manual_seed(0)
    resnet = NarrowResNet(num_classes=5)
    randomize(resnet)
    record("resnet18", resnet, torch.randn(2, 3, 32, 32))
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=5
    )
    randomize(vit)
    with torch.no_grad():
        vit.cls_token.normal_()
        vit.pos_embed.normal_()
    resized = resample_abs_pos_embed(vit.pos_embed.detach(), new_size=[6, 6], num_prefix_tokens=1)
    record("vit", vit, torch.randn(2, 3, 16, 16), pos_embed_6x6=resized.contiguous())


if __name__ == "__main__":
    main()
