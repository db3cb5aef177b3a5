"""Train a small network with each feature of the card, and compare the parameters with loops by
hand in optax.

    python -m benchmarks.accelerator.card [--tiny]

Products are computed in float32 ("highest"): differences are then those of the order of sums.
"""

import argparse
import functools
import os
import signal
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.accelerator import DETERMINISTIC
from benchmarks.accelerator.rows import record, record_close
from jengine import Runner
from jengine.extras.networks.networks import SmallCNN
from jengine.hooks import Hook
from jengine.model import CrossEntropy, LinenModel

STEPS = 20
BATCH = 16
LR = 0.05
CLIP = 1.0
DECAY = 1e-2
MOMENTUM = 0.9
GROUPS = dict(bias_lr_mult=2.0, bias_decay_mult=0.0, norm_decay_mult=0.0)
SGD = dict(type="SGD", lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
ADAMW = dict(type="AdamW", lr=1e-3, weight_decay=DECAY)
TOLERANCE = 1e-5  # relative to the largest parameter

MODULE = SmallCNN(widths=(8, 16))


def make_batches(count=STEPS, size=BATCH):
    """Return host batches of images f[size, 16, 16, 3] and labels."""
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.standard_normal((size, 16, 16, 3), np.float32),
            "label": rng.integers(0, 10, size).astype(np.int32),
        }
        for _ in range(count)
    ]


class DenseImages(nn.Module):
    """MLP without batch statistics, whose loss over a large batch is the mean over its parts."""

    @nn.compact
    def __call__(self, image, train=False):
        """Return logits f[B, 10] of images f[B, H, W, C]."""
        x = image.reshape(image.shape[0], -1)
        return nn.Dense(10)(jnp.tanh(nn.Dense(32)(x)))


def dense_model():
    """Return the MLP as a model for the Runner."""
    return LinenModel(DenseImages(), CrossEntropy())


def train(work_dir, optimizer=SGD, model=None, batches=None, steps=STEPS, **overrides):
    """Train with the Runner and return it."""
    wrapper = dict(optimizer=optimizer, clip_grad=dict(max_norm=CLIP), paramwise_cfg=GROUPS)
    wrapper |= overrides.pop("optim_wrapper", {})
    train_cfg = dict(by_epoch=False, max_iters=steps) | overrides.pop("train_cfg", {})
    settings = dict(
        parallel=dict(type="SingleDevice"), default_hooks=dict(checkpoint=None), log_level="WARNING"
    )
    runner = Runner(
        LinenModel(MODULE, CrossEntropy()) if model is None else model,
        work_dir,
        train_dataloader=make_batches() if batches is None else batches,
        train_cfg=train_cfg,
        optim_wrapper=wrapper,
        randomness=dict(seed=0),
        **{**settings, **overrides},
    )
    runner.train()
    return runner


def by_hand(optimizer, variables, batches):
    """Train in optax, with the groups' rates and decays as masks; return the parameters after
    each step.
    """
    params = jax.tree.map(jnp.array, variables["params"])
    stats = variables["batch_stats"]

    def is_norm(path):
        return any("bn" in str(key) for key in path)

    def is_bias(path):
        return path[-1].key == "bias"

    decayed = jax.tree_util.tree_map_with_path(
        lambda path, _: not (is_norm(path) or is_bias(path)), params
    )
    # As in MMEngine, `bias_lr_mult` is for biases outside of norms.
    rates = jax.tree_util.tree_map_with_path(
        lambda path, _: 2.0 if is_bias(path) and not is_norm(path) else 1.0, params
    )
    decay = optax.add_decayed_weights(DECAY, mask=decayed)
    core = (
        [decay, optax.trace(MOMENTUM)]
        if optimizer["type"] == "SGD"
        else [optax.scale_by_adam(eps=1e-8), decay]
    )
    tx = optax.chain(optax.clip_by_global_norm(CLIP), *core, optax.scale(-optimizer["lr"]))

    @jax.jit
    def step(params, stats, opt_state, batch):
        def compute_loss(params):
            variables = {"params": params, "batch_stats": stats}
            logits, updated = MODULE.apply(
                variables, batch["image"], train=True, mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), updated["batch_stats"]

        (_, stats_after), grads = jax.value_and_grad(compute_loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        updates = jax.tree.map(lambda u, rate: u * rate, updates, rates)
        return optax.apply_updates(params, updates), stats_after, opt_state

    opt_state = tx.init(params)
    history = []
    for batch in batches:
        params, stats, opt_state = step(params, stats, opt_state, batch)
        history.append(params)
    return history


def difference(actual, expected):
    """Return the largest difference of two trees, relative to the largest value; infinity if it
    is not a number.
    """
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    gap = max(
        float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))))
        for a, b in pairs
    )
    scale = max(float(np.max(np.abs(np.asarray(b, np.float64)))) for _, b in pairs)
    return gap / scale if np.isfinite(gap) else float("inf")


def initial_variables(runner):
    """Return the variables with which a Runner starts."""
    key = jax.random.fold_in(jax.random.key(runner.seed), 0)
    params, model_state = runner.model.init(key, make_batches(1)[0])
    return {"params": params, **model_state}


def check_optimizers(directory):
    """Compare SGD and AdamW by groups, with clipping, and the average of the parameters."""
    for optimizer in (SGD, ADAMW):
        name = optimizer["type"]
        ema = dict(type="EMAHook", momentum=0.1)
        runner = train(f"{directory}/{name}", optimizer, custom_hooks=[ema])
        history = by_hand(optimizer, initial_variables(runner), make_batches())
        record_close(
            f"{name}, groups and clipping, {STEPS} steps",
            difference(runner.state.params, history[-1]),
            5e-5,
        )
        average = history[0]
        for params in history[1:]:
            average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        found = runner.state.hook_state["EMAHook"].params
        record_close(f"{name}, EMA of the parameters", difference(found, average), 5e-5)
        runner.close()


def check_accumulation(directory):
    """Compare four micro-batches with one large batch."""
    batches = make_batches()
    large = [
        {key: np.concatenate([batch[key] for batch in batches[i : i + 4]]) for key in batches[0]}
        for i in range(0, STEPS, 4)
    ]
    small = train(
        f"{directory}/micro", model=dense_model(), optim_wrapper=dict(accumulative_counts=4)
    )
    whole = train(f"{directory}/large", model=dense_model(), batches=large, steps=STEPS // 4)
    record_close(
        "accumulation of 4 / one batch of 4 times the size",
        difference(small.state.params, whole.state.params),
        TOLERANCE,
    )
    amp = dict(type="AmpOptimWrapper", dtype="float16", accumulative_counts=4)
    amp_small = train(f"{directory}/amp_micro", model=dense_model(), optim_wrapper=amp)
    record_close(
        "accumulation in float16 / in float32",
        difference(amp_small.state.params, small.state.params),
        2e-2,
    )


class StateAt(Hook):
    """Hold copies of the parameters and of the loss scale after each iteration."""

    def __init__(self):
        self.params = []
        self.scales = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        """Copy them to the host."""
        self.params.append(jax.device_get(runner.state.params))
        self.scales.append(float(optax.tree.get(runner.state.opt_state, "loss_scale")))


def check_precision(directory):
    """Compare half precisions with float32, and inject an overflow."""
    single = train(f"{directory}/float32")
    amp = dict(type="AmpOptimWrapper", dtype="bfloat16")
    bfloat16 = train(f"{directory}/bfloat16", optim_wrapper=amp)
    record_close("bfloat16 / float32", difference(bfloat16.state.params, single.state.params), 0.1)
    batches = make_batches()
    batches[7] = {**batches[7], "image": np.full_like(batches[7]["image"], np.inf)}
    states = StateAt()
    scale = dict(init_scale=1024.0, growth_interval=5)
    amp = dict(type="AmpOptimWrapper", dtype="float16", loss_scale=scale)
    train(f"{directory}/float16", batches=batches, optim_wrapper=amp, custom_hooks=[states])
    equal = difference(states.params[7], states.params[6])
    record_close("float16: change of the parameters by an overflow", equal, 0.0)
    before = states.scales[6]
    after = states.scales[7]
    record(
        "float16: loss scale before and after an overflow",
        f"{before:g}, {after:g}",
        "halved",
        after == before / 2,
    )
    record(
        "float16: loss scale at the end",
        states.scales[-1],
        "> after the overflow",
        states.scales[-1] > after,
    )
    clean = train(f"{directory}/float16_clean", optim_wrapper=amp)
    record_close("float16 / float32", difference(clean.state.params, single.state.params), 0.1)


def check_paths(directory):
    """Compare chunks and the strategies for several devices, with the one that is here, with
    single steps.
    """
    single = train(f"{directory}/single").state
    chunks = train(f"{directory}/chunks", train_cfg=dict(steps_per_call=10)).state
    record_close("chunks of 10 / single steps", difference(chunks.params, single.params), TOLERANCE)
    strategies = {
        "Pjit": dict(type="Pjit"),
        "DataParallel": dict(type="DataParallel"),
    }
    for name, parallel in strategies.items():
        found = train(f"{directory}/{name}", parallel={**parallel, "devices": 1}).state
        record_close(f"{name} / SingleDevice", difference(found.params, single.params), TOLERANCE)


class GuardTransfers(Hook):
    """Refuse implicit transfers within iterations, from `first` on."""

    def __init__(self, first):
        self.first = first
        self.guarded = 0
        self._guard = None

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        """Enter the guard."""
        if runner.iter >= self.first:
            self._guard = jax.transfer_guard("disallow")
            self._guard.__enter__()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        """Leave the guard."""
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
            self._guard = None
            self.guarded += 1


def check_transfers(directory):
    """Train with a guard around each iteration without a log line."""
    guard = GuardTransfers(first=3)
    hooks = dict(checkpoint=None, logger=dict(type="LoggerHook", interval=1000))
    try:
        train(f"{directory}/guard", custom_hooks=[guard], default_hooks=hooks)
        record(
            "iterations without an implicit transfer",
            guard.guarded,
            f"{STEPS - 3}",
            guard.guarded == STEPS - 3,
        )
    except Exception as error:
        record(
            "iterations without an implicit transfer",
            f"{type(error).__name__}: {error}"[:300],
            "none",
            False,
        )


def check_validation(directory):
    """Compare the accuracy over a padded last batch with NumPy's."""
    from jengine.data import ArrayDataset

    (batch,) = make_batches(1, 50)
    runner = train(
        f"{directory}/validation",
        val_dataloader=dict(batch_size=16, dataset=ArrayDataset(batch)),
        val_cfg=dict(),
        val_evaluator=dict(type="Accuracy"),
    )
    metrics = runner.val()
    state = runner.state
    logits = MODULE.apply({"params": state.params, **state.model_state}, batch["image"])
    expected = float((np.argmax(logits, axis=-1) == batch["label"]).mean())
    record_close(
        "accuracy over a padded batch - NumPy's", abs(metrics["accuracy/top1"] - expected), 1e-6
    )


class KillAt(Hook):
    """Kill the process after an iteration."""

    def __init__(self, iteration):
        self.iteration = iteration

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        """Kill it, with checkpoints written so far complete."""
        if runner.iter + 1 == self.iteration:
            runner.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def run_job(work_dir, kill_at, resume, out):
    """Train with dropout, averages and accumulation, saving every 5 iterations; write the
    parameters to `out`.
    """
    runner = train(
        work_dir,
        ADAMW,
        model=LinenModel(SmallCNN(widths=(8, 16), dropout=0.2), CrossEntropy()),
        batches=None,
        optim_wrapper=dict(accumulative_counts=2),
        custom_hooks=[dict(type="EMAHook", momentum=0.1), *([KillAt(kill_at)] if kill_at else [])],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=5)),
        resume=resume,
    )
    leaves = jax.device_get(jax.tree.leaves((runner.state.params, runner.state.hook_state)))
    np.savez(out, *leaves)


def check_resume(directory):
    """Kill a run and resume it, with deterministic operations and without, and compare it with
    one that was not.
    """
    settings = {"deterministic": DETERMINISTIC, "default": ""}

    def start(name, role, *arguments):
        flags = f"{os.environ.get('XLA_FLAGS', '')} {settings[name]}".strip()
        command = [
            sys.executable,
            "-m",
            "benchmarks.accelerator.card",
            "--job",
            f"{directory}/{name}_{role}",
        ]
        return subprocess.Popen([*command, *arguments], env={**os.environ, "XLA_FLAGS": flags})

    first = {}
    for name in settings:
        whole = start(name, "whole", "--out", f"{directory}/{name}_whole.npz")
        killed = start(name, "killed", "--kill", "13")
        first[name] = whole, killed
    codes = {name: (whole.wait(), killed.wait()) for name, (whole, killed) in first.items()}
    resumed = {
        name: start(name, "killed", "--resume", "--out", f"{directory}/{name}_resumed.npz")
        for name in settings
    }
    for name, process in resumed.items():
        codes[name] = (*codes[name], process.wait())
        wanted = (0, -signal.SIGKILL, 0)
        if codes[name] != wanted:
            record(
                f"kill and resume, {name}",
                f"exit codes {codes[name]}",
                f"{tuple(map(int, wanted))}",
                False,
            )
            continue
        whole, after = (np.load(f"{directory}/{name}_{kind}.npz") for kind in ("whole", "resumed"))
        arrays = [[file[key] for key in file.files] for file in (after, whole)]
        bound = 0.0 if name == "deterministic" else TOLERANCE
        record_close(
            f"kill and resume, {name} operations: parameters and averages",
            difference(*arrays),
            bound,
        )


CHECKS = (
    check_optimizers,
    check_accumulation,
    check_precision,
    check_paths,
    check_validation,
    check_transfers,
    check_resume,
)


def main():
    """Run all checks; one that raises is recorded, and the others go on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="changes nothing: the network is tiny anyway"
    )
    parser.add_argument("--job", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--kill", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    if args.job:
        run_job(args.job, args.kill, args.resume, args.out)
        return
    with tempfile.TemporaryDirectory() as directory:
        for check in CHECKS:
            run_check(functools.partial(check, directory), check.__name__)


def run_check(check, name):
    """Run a check, and record an exception as a failed row."""
    try:
        check()
    except Exception as error:
        import traceback

        traceback.print_exc()
        record(name, f"{type(error).__name__}: {error}"[:300], "no exception", False)


if __name__ == "__main__":
    main()
