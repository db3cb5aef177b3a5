"""Fine-tune a language model on prompts with responses: LoRA, and a loss on the responses only.

    jengine train configs/instruct.py:weights/Llama-3.2-1B
    --config.train_dataloader.dataset.sources=answers.jsonl jengine train configs/lm.py:tiny
    --work-dir work_dirs/lm jengine train configs/instruct.py:work_dirs/lm

The first adapts a directory of the Hugging Face Hub, with the data of a file; the others a model of
bytes that was trained here, which then learns to add. Without a base, training starts from random
weights.
"""

import os

from ml_collections import ConfigDict

from jengine.extras.weights import transformer_arguments

# As `tiny` in configs/lm.py.
SMALL = dict(width=128, depth=3, heads=4, mlp_width=384, vocab_size=257, remat=False)


def get_config(base: str = "") -> ConfigDict:
    """Return the config.

    Args:
      base: a directory of the Hugging Face Hub with a language model and its tokenizer, or a
        checkpoint or work dir of `configs/lm.py:tiny`.
    """
    config = ConfigDict()
    is_hub = os.path.isfile(os.path.join(base, "config.json"))
    tokenizer = base if is_hub else "bytes"
    length = 512 if is_hub else 64

    # Records with `prompt` and `response`, or `messages`; a .jsonl file has one in each line.
    train, test = (dict(type="Additions", limit=20, split=split) for split in ("train", "test"))
    style = dict(tokenizer=tokenizer, template="{prompt}", response="response")

    language_model = dict(
        type="LinenModel",
        module=dict(type="TransformerLM", **(transformer_arguments(base) if is_hub else SMALL)),
        loss=dict(type="CrossEntropy", label="targets", ignore_index=-1),
        inputs=["tokens", "segment_ids", "positions"],
    )
    adapted = dict(type="LoRA", model=language_model, rank=8, targets=["attn|mlp"])
    config.model = dict(
        type="TextGenerator", model=adapted, max_new_tokens=128 if is_hub else 8, **style
    )
    if base:
        config.load_from = base
    if is_hub:
        config.precision = "bfloat16"  # of the computation
    config.parallel = dict(type="Pjit", mesh=dict(data=1, fsdp=-1))

    rows = dict(type="PackedText", length=length, **style)
    config.train_dataloader = dict(batch_size=8, dataset=dict(rows, sources=train))
    config.val_dataloader = dict(
        rows=dict(batch_size=8, dataset=dict(rows, sources=test, repeat=False, shuffle=False)),
        answers=dict(batch_size=64, dataset=dict(type="Prompts", source=test, **style)),
    )
    config.val_evaluator = dict(
        rows=dict(type="Perplexity", label="targets", ignore_index=-1),
        answers=dict(type="TextScore", tokenizer=tokenizer),
    )
    config.val_cfg = dict(answers=dict(epoch_length=4))
    config.test_dataloader = config.val_dataloader.rows
    config.test_evaluator = config.val_evaluator.rows
    config.test_cfg = dict()

    config.train_cfg = dict(by_epoch=False, max_iters=600, val_interval=200)
    config.optim_wrapper = dict(
        optimizer=dict(type="AdamW", lr=2e-4 if is_hub else 3e-3, weight_decay=0.0),
        clip_grad=dict(max_norm=1.0),
    )
    config.param_scheduler = [
        dict(type="LinearLR", start_factor=0.01, by_epoch=False, end=20),
        dict(type="CosineAnnealingLR", by_epoch=False, begin=20, end=600, eta_min_ratio=0.1),
    ]
    config.default_hooks = dict(
        logger=dict(type="LoggerHook", interval=20),
        checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=200, max_keep_ckpts=2),
    )
    config.randomness = dict(seed=0)
    return config
