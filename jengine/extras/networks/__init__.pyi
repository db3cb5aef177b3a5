# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.networks.attention import attend as attend
from jengine.extras.networks.convnext import ConvNeXt as ConvNeXt
from jengine.extras.networks.lora import LoRA as LoRA
from jengine.extras.networks.mixture import MixtureOfExperts as MixtureOfExperts
from jengine.extras.networks.networks import SmallCNN as SmallCNN
from jengine.extras.networks.networks import SmallViT as SmallViT
from jengine.extras.networks.quantized import Quantized as Quantized
from jengine.extras.networks.quantized import quantize as quantize
from jengine.extras.networks.resnet import ResNet as ResNet
from jengine.extras.networks.transformer import TransformerLM as TransformerLM
from jengine.extras.networks.transformer import get_policy as get_policy
from jengine.extras.networks.transformer_nnx import NnxTransformerLM as NnxTransformerLM
from jengine.extras.networks.transformer_nnx import nnx_transformer as nnx_transformer
from jengine.extras.networks.transformer_nnx import split_transformer as split_transformer
from jengine.extras.networks.vision_transformer import CLIP as CLIP
from jengine.extras.networks.vision_transformer import ViT as ViT
from jengine.extras.networks.vision_transformer import contrastive_loss as contrastive_loss
