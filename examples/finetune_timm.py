"""Fine-tune a vision transformer from a safetensors file in timm's layout, with LoRA, and export
the result.

    python examples/finetune_timm.py [--weights vit.safetensors]

Without a file, the example writes one: a transformer for the digits 0 to 4 in images with a margin,
  whose position
embeddings are resized to the images of the run. configs/finetune_vit.py is the config of the
fine-tuning.
"""

import argparse
import os
import pathlib
import re

import jax
import numpy as np
from safetensors.numpy import save_file

from jengine import Runner, load_config
from jengine.data import ArrayDataset, Digits
from jengine.extras.weights import export_params

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "finetune_vit.py"


def main(
    weights: str = "", max_iters: int = 400, work_dir: str = "work_dirs/finetune_timm"
) -> Runner:
    """Fine-tune, export `model.safetensors` with the updates added, and return the Runner."""
    weights = weights or pretrain(os.path.join(work_dir, "pretrained"), max_iters)
    config = load_config(
        f"{CONFIG}:{weights}", [f"work_dir={work_dir}", f"train_cfg.max_iters={max_iters}"]
    )
    runner = Runner.from_cfg(config)
    runner.train()
    tensors = export_params(work_dir, os.path.join(work_dir, "model.safetensors"))
    trained = sum(leaf.size for leaf in jax.tree.leaves(runner.state.params))
    print(f"trained {trained:,} numbers for a model with {sum(x.size for x in tensors.values()):,}")
    return runner


def pretrain(work_dir: str, max_iters: int) -> str:
    """Train the transformer for another task, and return the path of its weights in timm's
    layout.
    """
    config = load_config(CONFIG)
    model = config.model.model.copy_and_resolve_references()
    model.module.num_classes = 5
    runner = Runner(
        model=model.to_dict(),
        work_dir=work_dir,
        train_dataloader=dict(batch_size=64, dataset=dict(type=digits_with_margin, classes=5)),
        train_cfg=dict(by_epoch=False, max_iters=max_iters),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=3e-3), clip_grad=dict(max_norm=1.0)),
        randomness=dict(seed=1),
    )
    runner.train()
    tensors = export_params(runner.state.params, os.path.join(work_dir, "vit.safetensors"))
    path = os.path.join(work_dir, "timm.safetensors")
    save_file(to_timm(tensors), path)
    return path


def digits_with_margin(classes: int) -> ArrayDataset:
    """Return the digits below `classes` in images with a margin of two pixels, f32[12, 12, 1]."""
    digits = Digits(split="train")
    samples = [digits[i] for i in range(len(digits))]
    samples = [sample for sample in samples if sample["label"] < classes]
    images = np.pad(
        np.stack([sample["image"] for sample in samples]), ((0, 0), (2, 2), (2, 2), (0, 0))
    )
    return ArrayDataset(dict(image=images, label=np.stack([sample["label"] for sample in samples])))


def to_timm(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename exported tensors as timm does, and fuse query, key and value."""
    renamed = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^layers\.(\d+)\.ln(\d)", r"blocks.\1.norm\2", name)
        name = re.sub(r"^layers\.(\d+)\.fc", r"blocks.\1.mlp.fc", name)
        name = re.sub(r"^layers\.(\d+)\.attn\.out", r"blocks.\1.attn.proj", name)
        name = re.sub(r"^patch_embed\.", "patch_embed.proj.", name)
        if match := re.fullmatch(r"layers\.(\d+)\.attn\.query\.(\w+)", name):
            parts = [
                tensors[f"layers.{match[1]}.attn.{part}.{match[2]}"]
                for part in ("query", "key", "value")
            ]
            name = f"blocks.{match[1]}.attn.qkv.{match[2]}"
            tensor = np.concatenate(parts)
        if not name.startswith("layers."):  # keys and values are fused
            renamed[name] = tensor
    return renamed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", default="", help="a safetensors file in timm's layout")
    parser.add_argument("--max-iters", type=int, default=400)
    parser.add_argument("--work-dir", default="work_dirs/finetune_timm")
    args = parser.parse_args()
    main(args.weights, args.max_iters, args.work_dir)
