"""Train a decoder-only language model, on one device or many.

    jengine train configs/lm.py:tiny
    jengine plan configs/lm.py:1b --devices 256

`tiny` learns the bytes of the sources of Python's standard library in ten minutes on a CPU, `toy`
those of generated sentences in one. `124m` (GPT-2's), `1b` and `7b` have as many parameters, to be
trained on your own tokens, and `moe` 1.3 billion, of which a token uses 400 million. docs/scale.md
shows how, and derives the memory that a size takes on each chip.
"""

from typing import Any

from ml_collections import ConfigDict

SIZES = {
    "toy": dict(width=64, depth=2, heads=4, mlp_width=192, vocab_size=256),
    "tiny": dict(width=128, depth=3, heads=4, mlp_width=384, vocab_size=257, remat=False),
    "124m": dict(width=768, depth=12, heads=12, mlp_width=2048, vocab_size=50304),
    "1b": dict(width=2048, depth=16, heads=16, mlp_width=6144, vocab_size=32768),
    "7b": dict(width=4096, depth=32, heads=32, kv_heads=8, mlp_width=14336, vocab_size=32768),
    "moe": dict(
        width=1024,
        depth=16,
        heads=16,
        mlp_width=2816,
        vocab_size=32768,
        experts=8,
        experts_per_token=2,
    ),
}
# Examples that a process reads for a step, tokens of each, steps, warm-up, and the learning rate.
RECIPES = {
    "toy": dict(batch_size=16, length=64, iters=300, warmup=20, lr=5e-3),
    "tiny": dict(batch_size=16, length=256, iters=1600, warmup=100, lr=6e-3),
    "124m": dict(batch_size=32, length=1024, iters=50_000, warmup=1000, lr=6e-4),
    "1b": dict(batch_size=8, length=2048, iters=100_000, warmup=2000, lr=3e-4),
    "7b": dict(batch_size=4, length=4096, iters=250_000, warmup=2000, lr=3e-4),
    "moe": dict(batch_size=8, length=2048, iters=100_000, warmup=2000, lr=3e-4),
}
# The generated text of the others; their sizes are for tokens of your own.
SENTENCES = {"toy": 2000, "124m": 50_000, "1b": 50_000, "7b": 100_000, "moe": 50_000}

# The first axis of `layers` is the layer. `fsdp` divides the parameters of each matrix product,
# which are gathered when they are used; `tensor` divides heads, hidden channels and words, and with
# them the computation. `expert` divides the experts, `context` the tokens of an example, and for
# all else they do what `fsdp` does; a mesh has them if it names them.
FSDP = ("context", "fsdp", "expert")
RULES = [
    ("attn.query.kernel", (None, FSDP, "tensor")),
    ("attn.key.kernel", (None, FSDP, "tensor")),
    ("attn.value.kernel", (None, FSDP, "tensor")),
    ("attn.out.kernel", (None, "tensor", None, FSDP)),
    ("embed.embedding", (None, (*FSDP, "tensor"))),
    ("head.kernel", (FSDP, "tensor")),
]

MLP_RULES = [
    ("mlp.gate.kernel", (None, FSDP, "tensor")),
    ("mlp.up.kernel", (None, FSDP, "tensor")),
    ("mlp.down.kernel", (None, "tensor", FSDP)),
]
EXPERT_RULES = [
    ("experts.gate", (None, "expert", ("context", "fsdp"), "tensor")),
    ("experts.up", (None, "expert", ("context", "fsdp"), "tensor")),
    ("experts.down", (None, "expert", "tensor", ("context", "fsdp"))),
]


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config.

    Args:
      size: 'toy', 'tiny', '124m', '1b', '7b' or 'moe'.
    """
    if size not in SIZES:
        raise ValueError(f"the size after `lm.py:` must be one of {tuple(SIZES)}, got {size!r}")
    recipe = RECIPES[size]
    config = ConfigDict()

    has_experts = "experts" in SIZES[size]
    config.model = dict(
        type="LinenModel",
        module=dict(type="TransformerLM", **SIZES[size]),
        loss=dict(type="CrossEntropy", label="targets"),
        inputs="tokens",
    )
    if has_experts:
        config.model.sown_losses = dict(balance=0.01)  # Switch Transformer's weight
    if size == "tiny":  # whose tokens are bytes: it can write
        config.model = dict(
            type="TextGenerator",
            model=config.model,
            tokenizer="bytes",
            max_new_tokens=200,
            temperature=0.7,
        )
        config.custom_hooks = [
            dict(type="GenerationHook", prompts=["def ", "import "], interval=400)
        ]
    else:  # a CPU is slower in it
        # of the computation; parameters and optimizer state are float32
        config.precision = "bfloat16"
    rules = RULES + (EXPERT_RULES if has_experts else MLP_RULES)
    config.parallel = dict(
        type="Pjit", mesh=dict(data=1, fsdp=-1, tensor=1), rules=rules, strict=True
    )

    config.train_dataloader = dict(
        batch_size=recipe["batch_size"],
        dataset=_dataset(size, "train"),
        drop_last=True,
    )
    config.val_dataloader = dict(
        batch_size=recipe["batch_size"],
        dataset=_dataset(size, "test"),
    )
    config.test_dataloader = config.val_dataloader
    loss = dict(type="MeanLoss", loss=dict(type="CrossEntropy", label="targets"))
    config.val_evaluator = (
        [loss, dict(type="BitsPerByte", label="targets")] if size == "tiny" else loss
    )
    config.test_evaluator = config.val_evaluator

    config.train_cfg = dict(
        by_epoch=False, max_iters=recipe["iters"], val_interval=recipe["iters"] // 10
    )
    config.val_cfg = dict()
    config.test_cfg = dict()

    # No weight decay for norms and for the embedding.
    config.optim_wrapper = dict(
        optimizer=dict(type="AdamW", lr=recipe["lr"], betas=(0.9, 0.95), weight_decay=0.1),
        clip_grad=dict(max_norm=1.0),
        paramwise_cfg=dict(custom_keys=dict(norm=dict(decay_mult=0.0), embed=dict(decay_mult=0.0))),
    )
    config.param_scheduler = [
        dict(type="LinearLR", start_factor=0.01, by_epoch=False, end=recipe["warmup"]),
        dict(
            type="CosineAnnealingLR",
            by_epoch=False,
            begin=recipe["warmup"],
            end=recipe["iters"],
            eta_min_ratio=0.1,
        ),
    ]

    config.default_hooks = dict(
        logger=dict(type="LoggerHook", interval=20),
        checkpoint=dict(
            type="CheckpointHook", by_epoch=False, interval=recipe["iters"] // 5, max_keep_ckpts=2
        ),
    )
    config.randomness = dict(seed=0)
    return config


def _dataset(size: str, split: str) -> dict[str, Any]:
    if size == "tiny":
        return dict(type="StandardLibrary", length=RECIPES[size]["length"], split=split)
    sentences = SENTENCES[size] // (5 if split == "test" else 1)
    return dict(type="Sentences", length=RECIPES[size]["length"], sentences=sentences, split=split)
