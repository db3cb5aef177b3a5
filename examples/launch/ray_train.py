"""Train a config with Ray Train, which places the processes and starts them again after a failure.

    pip install jengine 'ray[train]'
    python examples/launch/ray_train.py configs/digits_cnn.py --workers 2 --work-dir
    work_dirs/digits python examples/launch/ray_train.py configs/digits_cnn.py --workers 4 --gpu
    python examples/launch/ray_train.py configs/digits_cnn.py --workers 4 --tpu v5litepod-16
    --topology 4x4

Each worker is one process of the run. If one dies, JAX ends the others, and Ray starts a new group,
which continues from the newest checkpoint: the work dir must be on storage that all hosts share.
`--workers 2:4` is elastic: after a failure the run continues with as many workers as there is room
for.
"""

import argparse
import os


def train(settings):
    """Train on one worker; Ray has connected JAX's processes before."""
    from jengine import Runner
    from jengine.config import load_config

    cfg = load_config(settings["config"])
    cfg.work_dir = settings["work_dir"]
    cfg.resume = True  # continue, or start if there is no checkpoint yet
    Runner.from_cfg(cfg).train()


def main(argv=None):
    """Parse the arguments and run the training to the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--work-dir", required=True)
    parser.add_argument("--workers", default="2", metavar="N or MIN:MAX")
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--tpu", metavar="TYPE", help="accelerator type of a TPU slice")
    parser.add_argument("--topology", help="topology of the TPU slice: 4x4")
    parser.add_argument(
        "--max-failures", type=int, default=3, help="number of restarts; -1 for no limit"
    )
    args = parser.parse_args(argv)

    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    low, _, high = args.workers.partition(":")
    accelerator = (
        dict(use_tpu=True, topology=args.topology, accelerator_type=args.tpu) if args.tpu else {}
    )
    on_cpu = not (args.gpu or args.tpu)
    work_dir = os.path.abspath(args.work_dir)
    trainer = JaxTrainer(
        train,
        train_loop_config=dict(config=os.path.abspath(args.config), work_dir=work_dir),
        scaling_config=ScalingConfig(
            num_workers=(int(low), int(high)) if high else int(low), use_gpu=args.gpu, **accelerator
        ),
        # Ray connects JAX's processes for TPUs and GPUs only; on CPUs it does so if told that there
        # are GPUs.
        jax_config=JaxConfig(use_gpu=True) if on_cpu else None,
        run_config=RunConfig(
            name="ray",
            storage_path=work_dir,
            failure_config=FailureConfig(max_failures=args.max_failures),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}} if on_cpu else None,
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
