"""Faults planted in a CNN, a transformer and an NNX model, with the command that names each.

`FAULTS` is a table: what is changed in a config that trains, what a person runs, and the words by which the output
names the fault: the layer, the example, the setting, or the person's own line.
"""

import dataclasses

CODE = '''
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jengine.evaluation import HostMetric
from jengine.hooks import Hook
from jengine.model import CrossEntropy

KEPT = []


class Stripes:
    def __len__(self):
        return 32

    def __getitem__(self, i):
        image = np.random.RandomState(i).rand(8, 8, 1).astype(np.float32)
        image[2 * (i % 4)] += 1
        return transform({"image": image, "label": np.int32(i % 4)})


def transform(sample):
    return {**sample, "image": sample["image"] - 0.5}


class Text:
    def __len__(self):
        return 32

    def __getitem__(self, i):
        tokens = (np.arange(9) * (i % 4 + 1) + i) % 12
        return {"tokens": tokens[:-1].astype(np.int32), "label": tokens[-1].astype(np.int32), "real": np.arange(8) < 8 - i % 3}


def collate(samples):
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


class Watch(Hook):
    def __init__(self):
        self.seen = 0

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.seen += 1


class Right(HostMetric):
    def process(self, data_batch, data_samples):
        self.results.append(np.asarray(data_samples).argmax(-1) == data_batch["label"])

    def compute_metrics(self, results):
        return {"right": float(np.mean(results))}


def entropy(outputs, batch):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(outputs), batch["label"][:, None], 1)
    return -chosen.mean()


class ConvBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3), (2, 2))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.relu(x)


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for i in range(2):
            x = ConvBlock(name=f"blocks_{i}")(x, train)
        x = x.mean((1, 2))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(4, name="head")(x)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        query, key, value = jnp.split(nn.Dense(48)(x), 3, axis=-1)
        scores = jnp.einsum("bqd,bkd->bqk", query, key) / 4.0
        scores = jnp.where(mask[:, None, :], scores, -1e9)
        return nn.Dense(16)(jax.nn.softmax(scores) @ value)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        x = x + Attention(name="attention")(nn.LayerNorm()(x), mask)
        h = nn.gelu(nn.Dense(32, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(16, name="down")(h)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens, mask):
        x = nn.Embed(12, 16, name="embedding")(tokens)
        for i in range(1):
            x = Layer(name=f"layers_{i}")(x, mask)
        x = x.mean(1)
        return nn.Dense(12, name="head")(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return x + nnx.relu(self.norm(self.linear(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Linear(64, 16, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x.reshape(len(x), -1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)
'''
CONFIG = """

def get_config():
    return dict(
        model=dict(MODEL),
        train_dataloader=dict(batch_size=8, dataset=dict(type=DATASET), sampler=dict(type="DefaultSampler", shuffle=False), collate_fn=collate),
        val_dataloader=dict(batch_size=8, dataset=dict(type=DATASET)),
        val_cfg=dict(),
        val_evaluator=[dict(type="Accuracy"), dict(type=Right)],
        train_cfg=dict(max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.003)),
        param_scheduler=[],
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=2)),
        custom_hooks=[dict(type=Watch)],
        randomness=dict(seed=0),
    )
"""
MODELS = {
    "cnn": ('type="LinenModel", module=dict(type=Cnn), loss=entropy', "Stripes"),
    "transformer": ('type="LinenModel", module=dict(type=Transformer), loss=entropy, inputs=["tokens", "real"]', "Text"),
    "nnx": ('type="NnxModel", module=NnxNet, loss=entropy', "Stripes"),
}
PLAIN = "train config.py"
CHECK = "train config.py --check"
DEBUG = "train config.py --debug"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault in a config that otherwise trains.

    Attributes:
      model: the key in `MODELS`.
      changes: old and new text, one pair after the other.
      says: the words in the output that name the fault, as regular expressions; none if nothing does.
      command: the arguments of `jengine`.
      where: what the words name: layer, example, line, process, an attribute, or what is not
        in the code: an entry of the batch, or a setting.
      processes: how many train together, each started by itself; 0 for this one.
      earlier: the arguments of a command that runs before, with `sound.py`, the config without the fault.
    """

    model: str
    changes: tuple[str, ...]
    says: tuple[str, ...] = ()
    command: str = PLAIN
    where: str = "line"
    earlier: str = ""
    processes: int = 0


def write_config(fault: Fault) -> str:
    """Return the text of the config with its fault."""
    model, dataset = MODELS[fault.model]
    text = CODE + CONFIG.replace("MODEL", model).replace("DATASET", dataset)
    for old, new in zip(fault.changes[::2], fault.changes[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    return text


ITEM = 'return transform({"image": image, "label": np.int32(i % 4)})'
LOSS = "    return -chosen.mean()"
ACT = "        return nn.relu(x)"
SEEN = "        self.seen += 1"
LR = 'optimizer=dict(type="AdamW", lr=0.003)'
OWN_LOSS = "loss=entropy"
KEEP = "checkpoint=None"
NNX_ACT = "return x + nnx.relu(self.norm(self.linear(x)))"
EPOCH = "def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):\n        self.seen += 1"

FAULTS = {
    "a logarithm of negative values": Fault("cnn", (ACT, "        return jnp.log(x)"), command=CHECK, says=(r"NaN from `log` in the step of iteration 0", r"in the layer blocks_0, at .*config\.py:\d+ in __call__: return jnp\.log\(x\)",), where="layer, line"),
    "a root of negative values": Fault("nnx", (NNX_ACT, "return x + jnp.sqrt(self.norm(self.linear(x)))"), command=CHECK, says=(r"NaN from `sqrt` .*in the layer blocks\.0, at .*return x \+ jnp\.sqrt",), where="layer, line"),
    "a division by zero": Fault("transformer", ("return nn.Dense(16)(jax.nn.softmax(scores) @ value)", "x = jax.nn.softmax(scores) @ value\n        return nn.Dense(16)(x / (mask.sum(-1) - 6)[:, None, None])"), command=CHECK, says=(r"a division by zero .*for examples 2, 5 of the batch, in the layer layers_0\.attention, at .*mask\.sum\(-1\) - 6",), where="layer, example, line"),
    "a root of zero, whose gradient is infinite": Fault("cnn", (ACT, "        return jnp.sqrt(nn.relu(x))"), command=CHECK, says=(r"a division by zero .*in the layer blocks_0, at .*jnp\.sqrt\(nn\.relu\(x\)\)",), where="layer, line"),
    "a norm of zero, whose gradient is NaN": Fault("nnx", (LOSS, "    spread = outputs - jax.lax.stop_gradient(outputs)\n    return -chosen.mean() + jnp.linalg.norm(spread)"), command=CHECK, says=(r"a division by zero .*in entropy: return -chosen\.mean\(\) \+ jnp\.linalg\.norm",)),
    "a token that the embedding does not have": Fault("transformer", ("+ i) % 12", "+ i) % 12 + (i == 13)"), command=CHECK, says=(r"index 12 is out of bounds for an axis of size 12 .*for example 5 of the batch, in the layer embedding, at .*nn\.Embed", r"example 5 is sample 13",), where="layer, example, line"),
    "a gather with an index out of range": Fault("cnn", ("np.int32(i % 4)", "np.int32(i % 4 + (i == 15))"), command=CHECK, says=(r"index 4 is out of bounds for an axis of size 4 .*for example 7 of the batch, at .*take_along_axis", r"example 7 is sample 15",), where="example, line"),
    "a label that the outputs do not have": Fault("nnx", (OWN_LOSS, "loss=dict(type=CrossEntropy)", "np.int32(i % 4)", "np.int32(i % 4 + 1)"), says=(r"`Accuracy\.label` must be class indices from 0 to 3, as the outputs have 4 classes, got 1 to 4 in the entry 'label'",), where="entry"),
    "labels in one-hot form": Fault("cnn", (OWN_LOSS, "loss=dict(type=CrossEntropy)", "np.int32(i % 4)", "np.eye(4, dtype=np.int32)[i % 4]"), says=(r"the labels are in one-hot form: make them class indices",), where="entry"),
    "images without channels": Fault("cnn", ("rand(8, 8, 1)", "rand(8, 8)"), says=(r"the outputs have no axis of examples, .*do images lack channels",), where="entry"),
    "a layer that does not fit the one before it": Fault("nnx", ("self.head = nnx.Linear(16, 4", "self.head = nnx.Linear(32, 4"), says=(r"whose layer head \(Linear\) has in_features=32, not 16", r"called in __call__ at .*config\.py:\d+",), where="layer, line"),
    "a counter that becomes a float": Fault("nnx", ("self.calls[...] += 1", "self.calls.set_value(self.calls[...] + 0.5)"), says=(r"`model_state\.blocks\.0\.calls` must stay int32\[\] in a training step, got float32\[\]",), where="layer"),
    "float16 that overflows": Fault("transformer", ('h = nn.gelu(nn.Dense(32, name="up")(nn.LayerNorm()(x)))', 'h = nn.gelu(nn.Dense(32, name="up")(nn.LayerNorm()(x)))\n        h = (h.astype(jnp.float16) * 60000).astype(jnp.float32)'), command=CHECK, says=(r"an infinite value from `mul`, .*in the layer layers_0, at .*jnp\.float16\) \* 60000",), where="layer, line"),
    "tokens that overflow int8": Fault("transformer", ("tokens[:-1].astype(np.int32)", "(tokens[:-1] + 120).astype(np.int8)", "nn.Embed(12,", "nn.Embed(140,"), command="data config.py", says=(r"tokens \| int8 +\| \[8, 8\] \| -128 to 127",), where="entry"),
    "a loss that is read on the host": Fault("cnn", (LOSS, "    KEPT.append(float(chosen.mean()))\n" + LOSS), says=(r"in entropy\n +KEPT\.append\(float\(chosen\.mean\(\)\)\)",)),
    "an array that NumPy reads in a layer": Fault("nnx", (NNX_ACT, "return x + np.maximum(np.asarray(self.linear(x)), 0)"), says=(r"np\.asarray\(self\.linear\(x\)\)", r"in the layer blocks\.0 \(NnxBlock\)",), where="layer, line"),
    "a hook that waits for the device": Fault("cnn", (SEEN, '        self.seen += float(outputs["loss"])'), command=CHECK, says=(r"Watch\.after_train_iter moves values between host and device in iteration 0, at .*float\(outputs",)),
    "batches of another shape": Fault("transformer", ("samples[0]}", "samples[0]}", "def collate(samples):\n    return {", "def collate(samples):\n    length = int(samples[0]['tokens'][0]) % 3 + 6\n    for sample in samples:\n        sample.update(tokens=sample['tokens'][:length], real=sample['real'][:length])\n    return {"), says=(r"the training step is compiled again", r"batch\.tokens: was int32\[8,6\], is int32\[8,8\]",), where="entry"),
    "a function that is compiled in each epoch": Fault("cnn", (EPOCH, 'def before_train_epoch(self, runner):\n        self.seen = jax.jit(lambda x: x.sum())(jnp.ones(3))', "max_epochs=2", "max_epochs=3"), says=(r"is compiled again and again, in the iterations 0, 4, 8, at .*config\.py:\d+ in before_train_epoch: self\.seen = jax\.jit",)),
    "a tracer that is left in a list": Fault("transformer", (LOSS, "    KEPT.append(chosen)\n" + LOSS), command=CHECK, says=(r"`KEPT` of .*config\.py keeps a value of the trace, float32\[8,1\], made at .*in entropy: chosen = jnp\.take_along_axis",)),
    "a mean over the axis of examples": Fault("cnn", ("x = x.mean((1, 2))", "x = x.mean((0, 1))"), says=(r"the outputs have 2 in the place of 8 examples: look for a mean",), where="entry"),
    "a mean over examples instead of tokens": Fault("transformer", ("x = x.mean(1)", "x = x.mean(0)"), command=DEBUG, says=(r"The prediction for an example changes by .* if others in its batch change: look for a mean.* before those of head\.",), where="layer"),
    "an attribute that changes after it was traced": Fault("cnn", ("def entropy(outputs, batch):", "class Scaled:\n    scale = 1.0\n\n    def __call__(self, outputs, batch):\n        return self.scale * entropy(outputs, batch)\n\n\nSCALED = Scaled()\n\n\ndef entropy(outputs, batch):", OWN_LOSS, "loss=SCALED", SEEN, "        SCALED.scale *= 0.5"), says=(r"`Scaled\.scale` must not change during training",), where="attribute"),
    "a mask whose axes are exchanged": Fault("transformer", ("mask[:, None, :]", "mask[None, :, :]"), command=DEBUG, says=(r"The prediction for an example changes by .* look for a mean, norm, softmax, mask or .* after the outputs of layers_0\.attention\.Dense_0, before those of layers_0\.attention\.Dense_1\.",), where="layer"),
    "dropout that drops nothing": Fault("cnn", ("deterministic=not train", "deterministic=True"), command=DEBUG, says=(r"Dropout_0 drops nothing in training",), where="layer"),
    "an output with another name": Fault("cnn", ('return nn.Dense(4, name="head")(x)', 'return {"logit": nn.Dense(4, name="head")(x)}', "log_softmax(outputs)", 'log_softmax(outputs["logits"])', 'dict(type="Accuracy"), ', ""), says=(r"in entropy\n +chosen = .*outputs\[\"logits\"\]", r"KeyError: 'logits'", r"outputs \(logit f32\[8,4\]\)")),
    "an average that never moves": Fault("nnx", ("custom_hooks=[dict(type=Watch)]", 'custom_hooks=[dict(type=Watch), dict(type="EMAHook", interval=8)]'), where="setting", says=(r"`EMAHook\.interval` must be below 8.*the average would stay at the first weights",)),
    "a process that lags": Fault("cnn", (SEEN, SEEN + "\n        if jax.process_index() == 1 and self.seen == 3:\n            import threading\n            threading.Event().wait(12)"), processes=2, where="process, line", says=(r"process 1 lags: iteration 2, in `hooks` for \d+ s, at .*config\.py:\d+ in after_train_iter: threading\.Event\(\)\.wait\(12\)", r"the device (computes|has not finished \d calls of) the training step \(update\), with .*all-reduce in ")),
    "units that are dead": Fault("cnn", ("nn.Conv(8, (3, 3), (2, 2))(x)", "nn.Conv(8, (3, 3), (2, 2))(x)", "x = nn.BatchNorm(use_running_average=not train)(x)", "x = nn.BatchNorm(use_running_average=not train)(x) - 100"), command=DEBUG, says=(r"All outputs of blocks_0, .* are zero: the units are dead",), where="layer"),
    "activations that explode": Fault("transformer", ('nn.Dense(16, name="down")(h)', 'nn.Dense(16, name="down", kernel_init=nn.initializers.normal(1e6))(h)'), command=DEBUG, says=(r"The outputs of layers_0\.down have an rms of",), where="layer"),
    "an example with an infinite value": Fault("nnx", ("image[2 * (i % 4)] += 1", "image[2 * (i % 4)] += np.inf if i == 21 else 1"), command=CHECK, says=(r"in the step of iteration 2, for example 5 of the batch, in the layer", r"the entry 'image' of the batch has values that are not finite, in example 5", r"example 5 is sample 21"), where="layer, example"),
    "an example with NaN": Fault("cnn", ("image[2 * (i % 4)] += 1", "image[2 * (i % 4)] += np.nan if i == 21 else 1"), says=(r"the entry 'image' of the batch has values that are not finite, in example 5",), where="example"),
    "an attention mask without any token": Fault("transformer", ("-1e9", "-jnp.inf", "np.arange(8) < 8 - i % 3", "np.arange(8) < 8 * (i != 13)"), command=CHECK, says=(r"NaN from `\w+` .*for example 5 of the batch, in the layer layers_0\.attention, at .*softmax\(scores\)", r"example 5 is sample 13"), where="layer, example, line"),
    "a loader that waits forever": Fault("cnn", ("def collate(samples):", "def collate(samples):\n    import threading\n    KEPT.append(1)\n    if len(KEPT) == 4:\n        threading.Event().wait(6)"), says=(r"Training has made no progress .*in `input` .*in collate: threading\.Event\(\)\.wait\(6\); it waits for train_dataloader",)),
    "a worker that dies": Fault("cnn", ("batch_size=8, dataset=dict(type=Stripes), sampler", "batch_size=8, num_workers=1, dataset=dict(type=Stripes), sampler", ITEM, "import ctypes\n        if i == 13:\n            ctypes.string_at(0)\n        " + ITEM), processes=1, says=(r'File ".*config\.py", line \d+ in __getitem__', r"the worker process \d+, which builds batches, was killed by SIGSEGV; what it printed is above"), where="line"),
    "a name that a transform does not know": Fault("cnn", ("    return {**sample,", "    sample = augment(sample)\n    return {**sample,"), says=(r"in transform\n +sample = augment\(sample\)", r"NameError: name 'augment'", r"in sample 0 of Stripes",)),
    "a name that collate does not know": Fault("transformer", ("np.stack([sample[name]", "np.stack([smaple[name]"), says=(r"in collate\n +return .*smaple", r"NameError: name 'smaple'",)),
    "a name that a hook does not know": Fault("nnx", (SEEN, "        self.seen += missing"), says=(r"in after_train_iter\n +self\.seen \+= missing", r"in Watch\.after_train_iter at iteration 0",)),
    "a name that a metric does not know": Fault("cnn", ("np.mean(results)", "np.mean(result)"), says=(r"in compute_metrics\n +return .*np\.mean\(result\)",)),
    "a name that a constructor does not know": Fault("nnx", ("self.stem = nnx.Linear(64, 16, rngs=rngs)", "self.stem = nnx.Linear(64, width, rngs=rngs)"), says=(r"in __init__\n +self\.stem = nnx\.Linear\(64, width",)),
    "a key that the batch does not have": Fault("transformer", ('batch["label"]', 'batch["labels"]'), says=(r"KeyError: 'labels'\n", r"batch \(label i32\[8\], real bool\[8,8\], tokens i32\[8,8\]\)",)),
    "statistics that are not updated": Fault("cnn", ("use_running_average=not train", "use_running_average=True"), command=DEBUG, says=(r"The steps have not changed model_state\.batch_stats\.blocks_0\.BatchNorm_0\.mean",), where="layer"),
    "a rule that matches no parameter": Fault("cnn", (LR, LR + ', paramwise_cfg=dict(custom_keys={"backbone": dict(lr_mult=0.1)})'), where="setting", says=(r"`paramwise_cfg`: 'backbone' matches no parameter",)),
    "a learning rate of zero": Fault("nnx", ("lr=0.003", "lr=0.0"), where="setting", says=(r"The learning rate is 0 in all iterations",)),
    "a learning rate that is too high": Fault("transformer", (LR, 'optimizer=dict(type="SGD", lr=1e6)'), where="setting", says=(r"the loss of iteration 2, .* is nan", r"the learning rate, here 1e\+06, is too large",)),
    "a schedule that ends before the run": Fault("cnn", ("param_scheduler=[]", 'param_scheduler=[dict(type="CosineAnnealingLR", by_epoch=False, end=3)]'), where="setting", says=(r"The learning rate stays at 0\.00075 from iteration 2 of 8 on",)),
    "a schedule that ends after the run": Fault("cnn", ("param_scheduler=[]", 'param_scheduler=[dict(type="CosineAnnealingLR", by_epoch=True, end=20)]'), where="setting", says=(r"CosineAnnealingLR in `param_scheduler` ends at iteration 80, after the run of 8: set its `end`",)),
    "an average that is mostly the first weights": Fault("cnn", ("custom_hooks=[dict(type=Watch)]", 'custom_hooks=[dict(type=Watch), dict(type="EMAHook", momentum=1e-4)]'), where="setting", says=(r"The EMAHook's averages, which validations use, are 100% the first weights at the end of 8 iterations",)),
    "a checkpoint of another model": Fault("nnx", ("for _ in range(2)", "for _ in range(3)", "custom_hooks=", "load_from='first/epoch_2', custom_hooks="), earlier="train sound.py --work-dir first --config.default_hooks.checkpoint.type=CheckpointHook", where="layer", says=(r"checkpoint .*first/epoch_2 does not fit: 18 match, 7 missing", r"missing +blocks\.2\.linear\.kernel",)),
    "pixels that are not scaled": Fault("cnn", ('"image": sample["image"] - 0.5', '"image": (sample["image"] * 255).astype(np.uint8)'), command=DEBUG, where="setting", says=(r"The entry 'image' of a batch has uint8 pixels from 0 to 255",)),
    "a part without gradients": Fault("nnx", ("x = self.stem(x.reshape(len(x), -1))", "x = jax.lax.stop_gradient(self.stem(x.reshape(len(x), -1)))"), command=DEBUG, says=(r"No loss reaches the parameters stem\.bias, stem\.kernel",), where="layer"),
}
