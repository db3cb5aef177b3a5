"""Record the weights and outputs of small models of other families of Hugging Face transformers.

Run this script next to its files, with packages that the tests do not need:
`pip install torch==2.13.0 transformers==5.24.0 safetensors`, then `python record_hub.py`.

Each model gives a directory as `save_pretrained` writes it, in bfloat16, and in it `outputs.npz` with its inputs,
images in (B, H, W, C), and the logits in float32.
"""

import pathlib
import sys

import numpy as np
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    ConvNextConfig,
    ConvNextForImageClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)  # fmt: skip

ROOT = pathlib.Path(__file__).parent
SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager")  # fmt: skip
# heads that are wider than the tokens
GEMMA = dict(SIZES, head_dim=6)
# Windows of 3 of 10 tokens, and other scores than those of the head size; the last block attends to all.
GEMMA2 = dict(GEMMA, query_pre_attn_scalar=9, sliding_window=3)
LONG = dict(rope_type="linear", factor=2.0, rope_theta=3000.0)
ROPE = dict(sliding_attention=dict(rope_type="default", rope_theta=500.0), full_attention=LONG)
TOWER = dict(hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3)
TEXT = dict(TOWER, hidden_size=8, num_attention_heads=2, vocab_size=30, max_position_embeddings=9, eos_token_id=29)
MODELS = {
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**GEMMA)),
    # caps that change scores and logits of this size
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**GEMMA2, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**dict(GEMMA2, num_hidden_layers=3), rope_parameters=ROPE,
                         layer_types=["sliding_attention", "sliding_attention", "full_attention"])
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=6)),
    # the example of docs/pretrained.md
    "starcoder2": lambda: Starcoder2ForCausalLM(Starcoder2Config(**SIZES, sliding_window=4)),
    "vit": lambda: ViTForImageClassification(ViTConfig(**TOWER, image_size=8, patch_size=4, num_labels=5)),
    "clip": lambda: CLIPModel(
        CLIPConfig(text_config=TEXT, vision_config=dict(TOWER, image_size=8, patch_size=4), projection_dim=6)
    ),
    "convnext": lambda: ConvNextForImageClassification(
        ConvNextConfig(num_stages=3, hidden_sizes=[8, 8, 12], depths=[1, 2, 1], num_labels=5, patch_size=2)
    ),
    "resnet": lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 1], num_labels=5)
    ),
    "resnet_basic": lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 2], num_labels=2, layer_type="basic",
                     downsample_in_first_stage=True)
    ),
}  # fmt: skip


def record(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    # the initial values are too small to show an error: zero biases, unit norms
    for path, array in model.state_dict().items():
        if array.is_floating_point() and not path.endswith(("logit_scale", "inv_freq")):
            scale = 0.3 if array.ndim > 1 else 0.1
            is_small = array.ndim == 1 and "layer_scale" not in path
            array.copy_(scale * torch.randn_like(array) + (array if is_small else 0))
    for path, array in model.state_dict().items():
        if path.endswith("running_var"):
            array.copy_(array.abs() + 0.5)
        elif "layer_scale" in path:
            array.copy_(array * 5)
    model.to(torch.bfloat16).save_pretrained(ROOT / name)
    model = type(model).from_pretrained(ROOT / name, dtype=torch.float32).eval()
    tokens = torch.randint(0, 40, (2, 10))
    image = torch.randn(2, 3, 16, 16)
    if name == "clip":
        tokens = torch.randint(0, 29, (3, 9))
        tokens[0, 8] = tokens[1, 4] = tokens[2, 6] = tokens[2, 8] = 29  # the first end is the last token
        inputs = dict(image=image[:, :, :8, :8], tokens=tokens)
        arguments = dict(pixel_values=inputs["image"], input_ids=tokens)
    elif name in ("vit", "convnext") or name.startswith("resnet"):
        size = 8 if name == "vit" else 16
        inputs = dict(image=image[:, :, :size, :size])
        arguments = dict(pixel_values=inputs["image"])
    else:
        inputs = dict(tokens=tokens)
        arguments = dict(input_ids=tokens)
    with torch.no_grad():
        outputs = model(**arguments)
    logits = outputs.logits_per_image if name == "clip" else outputs.logits
    arrays = {key: np.asarray(value) for key, value in inputs.items()}
    if "image" in arrays:
        arrays["image"] = arrays["image"].transpose(0, 2, 3, 1)
    if "tokens" in arrays:
        arrays["tokens"] = arrays["tokens"].astype(np.int32)
    np.savez(ROOT / name / "outputs.npz", logits=logits.numpy(), **arrays)
    (ROOT / name / "generation_config.json").unlink(missing_ok=True)


for name in sys.argv[1:] or MODELS:
    record(name)
