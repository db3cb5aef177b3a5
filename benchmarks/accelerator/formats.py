"""Time attention's kernels, optimizers and products in few bits, on the network of
`configs/lm.py:124m`.

    python -m benchmarks.accelerator.formats [--tiny]

Each is compared with what `auto`, AdamW with float32 moments, and bfloat16 do. Losses are those
after the same steps over the same tokens, and the memory of an optimizer is that of its state.
"""

import statistics
import tempfile
from importlib.util import find_spec

import jax
import jax.numpy as jnp

from benchmarks.accelerator.language import RunnerLoop, make_batches
from benchmarks.accelerator.rows import record
from benchmarks.accelerator.size import is_tiny
from benchmarks.timing import compare, time_block
from jengine.extras.networks.attention import attend
from jengine.hooks import Hook

# Examples, tokens and heads of each attention, and examples and tokens of a training step.
ATTENTIONS = {False: [(32, 1024, 12), (4, 8192, 12)], True: [(1, 128, 2)]}
STEP = {False: (32, 1024), True: (2, 64)}
IMPLEMENTATIONS = ("auto", "cudnn", "tokamax", "blocks")
FORMATS = ("int8", "float8_e4m3fn", "mxfp8", "nvfp4")
OPTIMIZERS = {
    "AdamW, moments in bfloat16": dict(type="AdamW", state_dtype="bfloat16"),
    "AdamW, moments in int8": dict(type="AdamW", state_dtype="int8"),
    "Muon": dict(type="Muon"),
    "NorMuon": dict(type="NorMuon"),
    "SOAP": dict(type="SOAP"),
    "Shampoo": dict(type="Shampoo"),
}
PACKAGES = {"tokamax": "tokamax"}  # of an implementation, if it needs one
LR = 1e-3
BLOCK, TURNS = 5, 3


def check_attention(shape, rounds):
    """Record the time of attention, forward and backward in bfloat16, by each implementation."""
    batch, length, heads = shape
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (batch, length, heads, 64), jnp.bfloat16) for key in keys]
    runs = {}
    for name in IMPLEMENTATIONS:
        label = f"attention, {batch} x {length} x {heads} heads, {name}"
        if name in PACKAGES and not find_spec(PACKAGES[name]):
            record(f"{label}", "the package is not there")
            continue

        def loss(query, key, value, weights, name=name):
            y = attend(query, key, value, implementation=name)
            return jnp.sum(y.astype(jnp.float32) * weights.astype(jnp.float32))

        step = jax.jit(jax.grad(loss, (0, 1, 2)))
        try:
            jax.block_until_ready(step(*arrays))
        except Exception as error:  # a kernel that is not for this device is a finding
            record(label, f"{type(error).__name__}: {error}"[:200])
            continue

        def run(iters, step=step):
            for _ in range(iters):
                grads = step(*arrays)
            jax.block_until_ready(grads)

        runs[name] = run
    for name, times in compare(runs, 2 if is_tiny() else 20, 3, rounds).items():
        label = f"attention, {batch} x {length} x {heads} heads, {name}"
        record(f"{label}: ms, forward and backward", times.wall / 1e3)
        record(f"{label} / auto", str(times.ratio))


class Loss(Hook):
    """Keep the loss of the newest iteration, on the device."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        """Keep it."""
        self.loss = outputs["loss"]


def check_step(label, size, batches, optimizer, dtype=None):
    """Record the time of a training step, the loss of the last and the size of the optimizer's
    state, with products in few bits if `dtype` is set.
    """
    hook = Loss()

    def change(cfg):
        cfg["custom_hooks"].append(hook)
        cfg["param_scheduler"] = None
        cfg["optim_wrapper"]["optimizer"] = dict(lr=LR, weight_decay=0.1, **optimizer)
        if dtype is not None:
            module = dict(type="Quantized", dtype=dtype, paths="layers/.*")
            cfg["model"]["module"] = dict(module=cfg["model"]["module"], **module)

    try:
        with tempfile.TemporaryDirectory() as directory:
            loop = RunnerLoop(size, batches, directory, change)
            blocks = [time_block(loop.run, BLOCK) for _ in range(TURNS)]
            loop.runner.close()
    except Exception as error:  # a finding, and no reason to leave out the others
        record(label, f"{type(error).__name__}: {error}"[:300], "a time", False)
        return
    state = jax.tree.leaves(loop.runner.state.opt_state)
    record(f"{label}: ms per step", statistics.median(block.wall for block in blocks) / 1e3)
    record(f"{label}: loss of step {2 + TURNS * BLOCK}", float(hook.loss))
    record(f"{label}: optimizer state, MiB", sum(leaf.nbytes for leaf in state) / 2**20)


def main():
    """Run all measurements."""
    tiny = is_tiny()
    size, shape = ("toy", STEP[True]) if tiny else ("124m", STEP[False])
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        for attention in ATTENTIONS[tiny]:
            check_attention(attention, 1)
        batches = make_batches(size, *shape)
        for dtype in (None, *FORMATS):
            label = f"products in {dtype or 'bfloat16'}"
            check_step(label, size, batches, dict(type="AdamW"), dtype)
        for name, optimizer in OPTIMIZERS.items():
            check_step(name, size, batches, optimizer)


if __name__ == "__main__":
    main()
