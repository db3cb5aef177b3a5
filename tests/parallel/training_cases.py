"""Small trainings for several processes: `python -m tests.parallel.training_cases DIR NAMES ADDRESS COUNT INDEX`.

Each function trains and returns arrays of this process; a single process with as many devices returns the same. Several
run in one process, since starting it takes longer than the training.
"""

import os
import pathlib
import pickle
import signal
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from jengine.data import ArrayDataset
from jengine.data.masking import get_mask
from jengine.evaluation import HostMetric
from jengine.extras.metrics import MetricAdapter
from jengine.extras.mmengine import dist
from jengine.extras.selfsup import PseudoLabelDataset
from jengine.hooks import Hook
from jengine.model import FunctionalModel, LinenModel
from jengine.parallel import (
    DataShard,
    all_gather_objects,
    assert_equal_across_processes,
    get_processes,
    launch,
)
from jengine.parallel.mesh import find_data_shard
from jengine.runner import Runner
from tests.extras.selfsup import test_odc_hook, test_swav_hook
from tests.parallel import test_exactness
from tests.parallel.conftest import make_loader
from tests.runner.conftest import build_runner

X = np.random.RandomState(0).randn(64, 8).astype(np.float32)
Y = X @ np.random.RandomState(1).randn(8, 4).astype(np.float32)
BATCH = 16  # examples of all processes


class Net(nn.Module):
    """Two layers with a BatchNorm between them."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(16, use_bias=False, name="up")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="bn")(x)
        return nn.Dense(4, name="down")(jnp.tanh(x))


def squared_error(outputs, batch):
    return jnp.square(outputs - batch["y"]).mean(axis=-1)


def reorder_as_for_two(examples):
    """Order the examples so that each batch of one process equals that of two, the share of the first in front."""
    return examples.reshape(-1, BATCH // 2, 2, *examples.shape[1:]).swapaxes(1, 2).reshape(examples.shape)


def local_entries(array):
    """Return the entries on the devices of this process, in order."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def local_rows(array):
    """Return the rows of a global batch that this process holds, each once."""
    if not isinstance(array, jax.Array):
        return array
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def make_runner(work_dir, x=X, **changes):
    count = jax.process_count()
    x, y = (x, Y) if count == 2 else (reorder_as_for_two(x), reorder_as_for_two(Y))
    arguments = dict(
        model=LinenModel(Net(), squared_error, inputs="x"),
        train_dataloader=dict(
            batch_size=BATCH // count,
            dataset=ArrayDataset(dict(x=x, y=y)),
            sampler=dict(type="DefaultSampler", shuffle=False),
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.05, momentum=0.9), clip_grad=dict(max_norm=1.0)),
    )
    return build_runner(work_dir, **{**arguments, **changes})


class BatchNormMeans(Hook):
    """Record the BatchNorm means of this process's replicas after an iteration and at the end of an epoch."""

    priority = "LOWEST"

    def __init__(self):
        self.means = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 2:
            self._record(runner, "within an epoch")

    def before_train_epoch(self, runner):
        if runner.epoch == 1:
            self._record(runner, "after an epoch")

    def _record(self, runner, when):
        self.means[when] = local_entries(runner.state.model_state["batch_stats"]["bn"]["mean"])


def train_replicas(work_dir, devices, **changes):
    """Train replicas with BatchNorm statistics, accumulation, an average and checkpoints."""
    batch_norm_means = BatchNormMeans()
    count = jax.process_count()
    runner = make_runner(
        work_dir,
        optim_wrapper=dict(
            optimizer=dict(type="SGD", lr=0.05, momentum=0.9), clip_grad=dict(max_norm=1.0), accumulative_counts=2
        ),
        val_dataloader=dict(batch_size=4 // count, dataset=ArrayDataset(dict(x=X[:12], y=Y[:12]))),
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=squared_error),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=-1), logger=None),
        custom_hooks=[dict(type="SyncBuffersHook"), dict(type="EMAHook", momentum=0.1), batch_norm_means],
        parallel=dict(type="DataParallel", devices=devices),
        **changes,
    )
    state = runner.train()
    average = state.hook_state["EMAHook"].params
    validation = {name: value for _, _, metrics in runner.validations for name, value in metrics.items()}
    predictions = {  # of 13 examples, which no number of devices divides
        "predictions of arrays": runner.predict(dict(x=X[:13]), batch_size=4 // count),
        "predictions of a dataset": runner.predict(ArrayDataset(dict(x=X[:13])), batch_size=4 // count),
    }
    return {
        **flatten("params", state.params), **flatten("average", average), **batch_norm_means.means, **validation,
        **predictions,
    }  # fmt: skip


def yield_examples(x=X, y=Y):
    for sample in zip(x, y, strict=True):
        yield dict(zip("xy", sample, strict=True))


def yield_reordered_examples():
    return yield_examples(reorder_as_for_two(X), reorder_as_for_two(Y))


def train_stream(work_dir, devices, stop=2):
    """Train on a stream of examples, of which each process takes its share, in two parts; return what it has seen."""
    seen = []

    class Record(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            seen.append(np.sort(local_entries(data_batch["x"])[:, 0]))

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            runner.train_loop.stop_training = runner.iter + 1 == stop

    count = jax.process_count()
    for part in (False, True):
        stop = stop if not part else None
        runner = make_runner(
            work_dir,
            train_dataloader=dict(
                batch_size=BATCH // count, dataset=yield_examples if count == 2 else yield_reordered_examples
            ),
            train_cfg=dict(max_epochs=2, epoch_length=3),
            default_hooks=dict(
                checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False, max_keep_ckpts=-1), logger=None
            ),
            custom_hooks=[Record()],
            parallel=dict(type="DataParallel", devices=devices),
            resume=part,
        )
        state = runner.train()
    return {**flatten("params", state.params), "seen": np.stack(seen)}


def train_whole(work_dir, devices):
    """Train, validate and predict with batches without an axis of examples, which each process reads whole."""

    def predict(params, batch):
        return batch["nodes"] @ params["w"]

    def loss(params, batch):
        return jnp.square(predict(params, batch) - batch["edges"].mean()).mean() + batch["kl"] * params["w"].sum()

    batches = [dict(nodes=X[8 * i : 8 * i + 8], edges=Y[i], kl=0.1 * i) for i in range(6)]
    data = dict(dataset=batches, batch_axis=None)
    runner = make_runner(
        work_dir, model=FunctionalModel(lambda: {"w": jnp.ones(8)}, loss, predict),
        train_dataloader=dict(**data, batch_rules=[("nodes", ("data",))]),
        val_dataloader=data, val_cfg=dict(), val_evaluator=[dict(type="MeanLoss", loss=lambda outputs, _: outputs), Mean()],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None), randomness=dict(seed=0),
        parallel=dict(type="Pjit", devices=devices),
    )  # fmt: skip
    runner.train()
    values = {name: value for _, _, metrics in runner.validations for name, value in metrics.items()}
    return {**flatten("params", runner.state.params), **values, "predictions": np.concatenate(runner.predict(data))}


class Mean(HostMetric):
    """Mean of all predictions, on the host."""

    def process(self, data_batch, data_samples):
        self.results.append(float(np.mean(data_samples)))

    def compute_metrics(self, results):
        return {"mean": float(np.mean(results)), "batches": float(len(results))}


class InOrder(HostMetric):
    """Keep the predictions by batch, and count the processes that compute a result."""

    def process(self, data_batch, data_samples):
        self.results.append((data_batch["x"], data_samples))

    def compute_metrics(self, results):
        x, predictions = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
        np.testing.assert_array_equal(2 * x, predictions)
        return {"order": predictions, "process": jax.process_index(), "drawn": np.random.default_rng().random()}


class Texts:
    """Metric of another library that joins all texts in order; it follows the interface of clu."""

    def __init__(self, texts):
        self.texts = texts

    @classmethod
    def from_model_output(cls, text, score):
        assert len(text) == len(score)
        return cls(text)

    def merge(self, other):
        return Texts(self.texts + other.texts)

    def compute(self):
        return np.array([int(text.removeprefix("text")) for text in self.texts])


def train_ordered(work_dir, devices):
    """Evaluate 21 examples with metrics that depend on the order, with one sharded program and with replicas."""
    count, x, found = jax.process_count(), np.arange(21, dtype=np.float32), {}
    data = [dict(x=x[i], text=f"text{i}") for i in range(len(x))]
    model = FunctionalModel(lambda: {"w": jnp.float32(2)}, lambda params, batch: batch["x"] * params["w"],
                            lambda params, batch: batch["x"] * params["w"])  # fmt: skip
    for kind in ("Pjit", "DataParallel"):
        path = work_dir / f"{kind}.pkl"
        metrics = [
            InOrder(prefix="own"),
            MetricAdapter(Texts, inputs=dict(text="text", score="predictions"), on_host=True),
            dict(type="DumpResults", out_file_path=str(path)),
        ]
        runner = Runner(
            model, str(work_dir / kind), test_dataloader=dict(batch_size=8 // count, dataset=data), test_cfg=dict(),
            test_evaluator=metrics, parallel=dict(type=kind, devices=devices),
        )  # fmt: skip
        results = runner.test()
        get_processes().all_gather("the file is written", None)
        results["dumped"] = np.array(pickle.loads(path.read_bytes()))
        found |= {f"{kind} {name}": value for name, value in results.items()}
    return found


def train_undivided(work_dir, devices):
    """Train with batches that are the same on all processes, and with batches of one repeated example."""
    warnings = []
    for name, x in (("same", X), ("constant", np.ones_like(X))):
        batches = [dict(x=x[i : i + 8], y=Y[:8]) for i in range(0, 64, 8)]
        if name == "constant":
            batches = [dict(x=batch["x"], y=np.ones_like(batch["y"])) for batch in batches]
        runner = make_runner(
            work_dir / name, train_dataloader=batches, parallel=dict(type="Pjit", devices=devices),
            train_cfg=dict(max_epochs=1),
        )  # fmt: skip
        runner.logger.addFilter(lambda record: warnings.append(record.getMessage()) or True)
        runner.train()
    return {"warnings": [text for text in warnings if "first batch" in text]}


def train_overflow(work_dir, devices):
    """Stop replicas in a window of float16 gradients that have overflowed, and continue with one sharded program."""

    class Stop(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            runner.train_loop.stop_training = runner.iter == 0

    for kind, hooks in (("DataParallel", [Stop()]), ("Pjit", [])):
        runner = make_runner(
            work_dir, x=np.full_like(X, 1e30), parallel=dict(type=kind, devices=devices), resume=True,
            optim_wrapper=dict(
                type="AmpOptimWrapper", dtype="float16", accumulative_counts=3, optimizer=dict(type="SGD", lr=0.1)
            ),
            train_cfg=dict(max_epochs=2, on_nonfinite="ignore"), custom_hooks=hooks,
            default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None),
        )  # fmt: skip
        runner.train()
    return {"iterations": int(runner.state.step), **flatten("params", runner.state.params)}


def train_sharded(work_dir, devices):
    """Train with parameters and optimizer sharded over all devices of all processes; two calls of the step an epoch."""
    runner = make_runner(
        work_dir,
        train_cfg=dict(max_epochs=2, steps_per_call=3),
        parallel=dict(type="Pjit", mesh=dict(data=1, fsdp=devices), fsdp_min_size=1, devices=devices),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=2), logger=None),
    )
    state = runner.train()
    return {"up": mask_remote_entries(state.params["up"]["kernel"])}


def mask_remote_entries(array):
    """Return the array with NaN in the entries that only another process has."""
    local = np.full(array.shape, np.nan, np.float32)
    for shard in array.addressable_shards:
        local[shard.index] = shard.data
    return local


def make_mesh(data):
    """Return a mesh with `tensor=2` across processes if possible, and `data` as well; None in a single process.

    Of four processes, the first and the second read the same rows, or with `data` the first and the third.
    """
    count = jax.process_count()
    if count == 1:
        return None
    devices = np.array(jax.devices())
    if data:
        devices = devices.reshape(count // 2, 2, -1).swapaxes(0, 1).reshape(2, 1, 2)
    else:
        devices = devices.reshape(count, -1).T.reshape(1, -1, 2)
    return Mesh(devices, ("data", "fsdp", "tensor"))


def train_on_mesh(work_dir, data=False, stream=False, stop=3, resume=False):
    """Train in two parts, with partial and padded batches and `tensor` across the processes, or on one device.

    Args:
      work_dir: for the logs and checkpoints.
      data: see `make_mesh`.
      stream: whether the data are a stream, in passes of four batches and an epoch of five, or 44 shuffled examples.
      stop: the number of iterations of the first part, which ends within a window of two and within an epoch.
      resume: a checkpoint from which to train the second part only.
    """
    mesh = make_mesh(data)
    shard = DataShard() if mesh is None else find_data_shard(mesh, jax.process_index())
    seen, last_validation = [], []

    class Record(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            rows, is_real = (local_rows(entry) for entry in (data_batch["x"], get_mask(data_batch)))
            seen.append(np.sort(rows[:, 0] if is_real is None else rows[is_real, 0]))

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            runner.train_loop.stop_training = runner.iter + 1 == stop and not resume

    class HostError(HostMetric):
        def process(self, data_batch, data_samples):
            assert len(data_batch["name"]) == len(data_samples)
            self.results += np.stack([data_batch["y"][:, 0], squared_error(data_samples, data_batch)], axis=1).tolist()

        def compute_metrics(self, results):
            last_validation[:] = results
            return {"examples": len(results), "median": float(np.median([error for _, error in results]))}

    size = 8 // shard.count
    if stream:
        loader = dict(batch_size=size, dataset=lambda: yield_examples(X[:32], Y[:32]))
    else:
        loader = dict(
            batch_size=size,
            dataset=ArrayDataset(dict(x=X[:44], y=Y[:44])),
            sampler=dict(type="DefaultSampler", shuffle=True),
            drop_last=False,
        )
    for checkpoint in [resume] if resume else [False, True]:
        runner = Runner(
            model=LinenModel(Net(), squared_error, inputs="x"),
            work_dir=work_dir,
            train_dataloader=loader,
            train_cfg=dict(max_epochs=2, epoch_length=5 if stream else None),
            optim_wrapper=dict(
                optimizer=dict(type="SGD", lr=0.05, momentum=0.9), clip_grad=dict(max_norm=1.0), accumulative_counts=2
            ),
            val_dataloader=dict(
                batch_size=size,
                dataset=ArrayDataset(dict(name=np.array([str(i) for i in range(13)]), x=X[:13], y=Y[:13])),
            ),
            val_cfg=dict(),
            val_evaluator=[
                dict(type="MeanLoss", loss=squared_error),
                HostError(),
                dict(type="R2Score", target="y"),
                *(
                    MetricAdapter(nnx.metrics.Welford, lambda p, batch: dict(values=p), name=name, on_host=on_host)
                    for name, on_host in (("device", False), ("host", True))
                ),
            ],
            default_hooks=dict(
                checkpoint=dict(type="CheckpointHook", interval=3, by_epoch=False, max_keep_ckpts=-1), logger=None
            ),
            custom_hooks=[Record()],
            parallel=mesh
            and dict(
                type="Pjit",
                mesh=mesh,
                rules=[("up.kernel", (None, "tensor")), ("down.kernel", (None, "tensor"))],
                fsdp_min_size=1,
            ),
            resume=checkpoint,
        )
        state = runner.train()
    validation = {name: value for _, _, metrics in runner.validations for name, value in metrics.items()}
    return {
        **flatten("params", gather(state.params)), **validation,
        "validated": np.sort(get_processes().broadcast("what process 0 has validated", last_validation), axis=0),
        "predictions of arrays": runner.predict(dict(x=X[:13]), batch_size=size),
        "predictions of a dataset": runner.predict(ArrayDataset(dict(x=X[:13])), batch_size=size),
        "shard": shard.index, "seen": np.concatenate(seen), "bounds": np.cumsum([len(rows) for rows in seen]),
    }  # fmt: skip


def train_tensor(work_dir, devices):
    return train_on_mesh(work_dir)


def train_tensor_stream(work_dir, devices):
    return train_on_mesh(work_dir, stream=True)


def train_data_tensor(work_dir, devices):
    return train_on_mesh(work_dir, data=True)


def train_data_tensor_stream(work_dir, devices):
    return train_on_mesh(work_dir, data=True, stream=True)


def train_guarded(work_dir, devices, nans=(33,), steps_per_call=1, **settings):
    """Train with a NaN in a sample that process 1 reads, in the third batch."""
    x = X.copy()
    x[list(nans)] = np.nan
    runner = make_runner(
        work_dir,
        x=x,
        train_cfg=dict(max_epochs=2, steps_per_call=steps_per_call),
        custom_hooks=[dict(type="NumericsGuardHook", **{"interval": 1, **settings})],
        parallel=dict(type="DataParallel", devices=devices),
    )
    state = runner.train()
    return {**flatten("params", state.params), "dropped": np.asarray(state.hook_state["NumericsGuardHook"].dropped)}


def train_swav(work_dir, devices):
    """Fill the queue of SwAV."""
    count = jax.process_count()
    x = np.random.RandomState(0).randn(32, 5).astype(np.float32)
    hook = dict(type="SwAVHook", batch_size=BATCH // count, feat_dim=4, queue_length=32, epoch_queue_starts=1)
    runner, _ = test_swav_hook.train(
        work_dir,
        epochs=3,
        train_dataloader=dict(
            batch_size=BATCH // count,
            dataset=ArrayDataset(dict(x=x if count == 2 else reorder_as_for_two(x))),
            sampler=dict(type="DefaultSampler", shuffle=False),
        ),
        custom_hooks=[dict(hook, priority="VERY_HIGH")],
        parallel=dict(type="Pjit", devices=devices),
    )
    return {"queue": np.asarray(runner.state.hook_state["SwAVHook"].rows)}


def train_odc(work_dir, devices):
    """Fill the memory of ODC by clustering."""
    loader = dict(batch_size=4 // jax.process_count(), dataset=PseudoLabelDataset(test_odc_hook.make_dataset()))
    runner = test_odc_hook.make_runner(
        work_dir, test_odc_hook.SETTINGS, train_dataloader=loader, parallel=dict(type="Pjit", devices=devices)
    )
    state = runner.train()
    bank = state.model_state["bank"]
    return {"labels": np.asarray(bank.labels), "features": np.asarray(bank.features), **flatten("params", state.params)}


def train_with(work_dir, cfg):
    make_runner(work_dir, cfg=cfg, parallel=dict(type="Pjit")).train()


def train_nothing(work_dir, devices):
    """Exchange values between the processes, and return them and the errors of exchanges that are refused."""
    processes = get_processes()
    index = processes.index
    values = [(index, "x" * 2**21 * index), jnp.arange(3, dtype=jnp.bfloat16), np.float32(0.1), {"a": {3: b"\x00"}}]
    first, array, scalar, _, second, *_, other = all_gather_objects(values, "Recall", processes)

    def refusal(function, *args):
        try:
            function(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was refused"

    config = {"config": {"hooks": [1, {"type": dict}], "nan": float("nan"), "object": object()}}
    assert_equal_across_processes(processes, config)
    return {
        "lengths": np.array([len(first[1]), len(second[1])]),
        "dtype": np.array([str(array.dtype), type(array).__name__, str(scalar.dtype)]),
        "bytes": np.array(list(other["a"][3])),
        "numbers": np.array(processes.all_gather("numbers", [index, 2**80])).astype(float),
        "unsendable": np.array(refusal(all_gather_objects, [0, lambda: 0], "Recall", processes)),
        "order": np.array(refusal(processes.all_gather, f"numbers {index}", 1)),
        "configs": np.array(refusal(train_with, work_dir / "configs", {"optim_wrapper": {"lr": [0.1, 0.5][index]}})),
        "mismatch": np.array(refusal(assert_equal_across_processes, processes, {"lr": [0.1, np.float32(0.1 + index)]})),
    }


def train_dist(work_dir, devices):
    """Exchange values with MMEngine's functions."""
    rank, world_size = dist.get_dist_info()
    objects = [rank, {"name": f"process {rank}"}]
    dist.broadcast_object_list(objects, src=1)
    collected = dist.collect_results([f"{rank}{i}" for i in range(3 - rank)], size=5)
    return {
        "info": [rank, world_size, dist.is_main_process(), dist.is_distributed()],
        "gathered": dist.all_gather_object(str(rank)),
        "gathered_at_1": str(dist.gather_object(rank, dst=1)),
        "broadcast": str(objects),
        "collected": str(collected),
        "seed": dist.sync_random_seed(),
        "master": str(dist.master_only(lambda: "called")()),
        "sum": dist.all_reduce(np.full(2, rank + 1.0)),
        "max": dist.all_reduce_dict({"b": jnp.float32(rank)}, "max")["b"],
        "stacked": dist.all_gather(jnp.arange(2) + rank),
        "from_1": dist.broadcast(np.array([rank]), src=1),
        "barrier": str(dist.barrier()),
    }


def flatten(name, tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {f"{name}{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}


class SlowHook(Hook):
    """Keep process 1 busy in each iteration, and send it the signal that requests a profile."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if jax.process_index() == 1:
            time.sleep(0.06)
            if runner.iter == 2:
                os.kill(os.getpid(), signal.SIGUSR2)


def train_watched(work_dir, devices):
    """Train with a slow process, which receives the request for a profile."""
    runner = make_runner(
        work_dir, custom_hooks=[SlowHook()], parallel=dict(type="Pjit", devices=devices),
        train_cfg=dict(max_epochs=3), default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=4)),
    )  # fmt: skip
    profiled = []
    runner.logger.addFilter(lambda record: profiled.append(record.getMessage()) or True)
    runner.train()
    log = pathlib.Path(runner.log_dir, f"{runner.timestamp}.log")
    lines = [line for line in log.read_text().splitlines() if "slowest: " in line] if jax.process_index() == 0 else []
    traces = pathlib.Path(runner.log_dir, "tf_tracing_logs").glob(
        f"iter_*/process_{jax.process_index()}/**/*.xplane.pb"
    )
    return {
        "profiled": [line for line in profiled if line.startswith("Profiling")], "slowest": lines,
        "traces": len(list(traces)),
    }  # fmt: skip


def train_failing(work_dir, devices):
    """Train with NaNs in three consecutive batches, one more than the guard allows, in one call of the step."""
    return train_guarded(work_dir, devices, nans=(17, 33, 49), max_in_row=2, interval=4, steps_per_call=4)


class ReadLoss(Hook):
    """Read the loss on one process, before the LoggerHook."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if jax.process_index() == 1:
            runner.message_hub.get_scalar("train/loss").current()


def train_nonfinite(work_dir, devices):
    """Train with a NaN in a sample that process 1 reads, in the third batch: the run must stop."""
    x = X.copy()
    x[33] = np.nan
    runner = make_runner(
        work_dir, x=x, default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=1)),
        custom_hooks=[ReadLoss()], parallel=dict(type="Pjit", devices=devices), train_cfg=dict(max_epochs=100),
    )  # fmt: skip
    try:
        runner.train()
    finally:
        print("stopped at", runner.iter, flush=True)


def train_exact(work_dir, parallel, loss, **changes):
    """Train with every feature at once; each process reads its share of batches of 12 and 6 real examples."""
    data = ArrayDataset({name: array[:18] for name, array in test_exactness.DATA.arrays.items()})
    loader = make_loader(12 // jax.process_count(), data, drop_last=False)
    state = test_exactness.train(work_dir, parallel, loss, train_dataloader=loader, **changes)
    params, average = gather((state.params, state.hook_state["EMAHook"].params))
    return {**flatten("params", params), **flatten("average", average)}


def gather(tree):
    """Return whole arrays, also of those of which each process has a part."""
    return jax.tree.map(lambda x: x if x.is_fully_addressable else process_allgather(x, tiled=True), tree)


def train_exact_replicas(work_dir, devices):
    return train_exact(work_dir, dict(type="DataParallel", devices=devices), "masked")


def train_exact_sharded(work_dir, devices):
    parallel = dict(type="Pjit", mesh=dict(data=1, fsdp=devices), fsdp_min_size=8, devices=devices)
    return train_exact(work_dir, parallel, "weighted")


def train_exact_resumed(work_dir, devices):
    """Continue, as replicas, the run whose checkpoint is stored next to the work dir."""
    parallel = dict(type="DataParallel", devices=devices)
    return train_exact(work_dir, parallel, "weighted", resume=work_dir.parent / "saved")


def main():
    folder, names, address = pathlib.Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
    count, index = map(int, sys.argv[4:])
    launch("none", address, count, index, timeout=60)
    for name in names:
        np.savez(folder / f"{name}_{index}.npz", **globals()[f"train_{name}"](folder / name, jax.device_count()))


if __name__ == "__main__":
    main()
