"""Race optimizers on a config: each at the best of several learning rates, with several seeds.

    python -m benchmarks.race lm [--steps 1600] [--seeds 3] [--work-dir DIR] [PATH=VALUE ...]

All optimizers have the same steps, rates, clipping and decayed parameters. The runs of seed 0 go
through the rates, then the best one is trained with the other seeds, all in one process:
`jengine sweep` trains all settings with the same seeds, each run in a process of its own, which
takes 5 s more of the CPU. results.jsonl in the work dir has a line for each run, and the same
command goes on after the last one. `PATH=VALUE` sets values in the config, such as
`train_dataloader.batch_size=4`.
"""

import argparse
import json
import pathlib
import statistics
import time

from benchmarks.report import table
from jengine import Runner, load_config

RATES = (8e-3, 1.6e-2, 4e-3, 3.2e-2, 2e-3)  # from the middle, so that the first ones say most
# Config, steps, warm-up as a share of them, betas, weight decay, the metric that is compared.
RACES = {
    "lm": ("configs/lm.py:tiny", 1600, 1 / 16, (0.9, 0.95), 0.1, "bits_per_byte"),
    "vit": ("configs/digits_vit.py", 1200, 1 / 12, (0.9, 0.98), 0.05, "loss"),
}
LOSS = {"type": "MeanLoss", "loss": {"type": "CrossEntropy"}}
SETTINGS = {
    "lm": ["custom_hooks=[]"],
    "vit": ["visualizer=None", f"val_evaluator=[{LOSS!r}, {{'type': 'Accuracy'}}]"],
}
OPTIMIZERS = ("AdamW", "Muon", "NorMuon", "SOAP", "Shampoo", "schedule_free_adamw")


def optimizer_settings(name, rate, betas, decay, warmup):
    """Return the config of an optimizer."""
    common = dict(type=name, weight_decay=decay)
    if name == "schedule_free_adamw":
        return dict(**common, learning_rate=rate, b1=betas[0], b2=betas[1], warmup_steps=warmup)
    if name == "AdamW":
        return dict(**common, lr=rate, betas=betas)
    if name == "SOAP":
        return dict(**common, lr=rate, adam_weight_decay=decay, betas=(0.95, betas[1]))
    if name == "Shampoo":
        return dict(**common, lr=rate, adam_weight_decay=decay, betas=betas)
    # updates as large as AdamW's, so that the same rates fit
    adam = dict(adam_b1=betas[0], adam_b2=betas[1], adam_weight_decay=decay)
    return dict(**common, **adam, lr=rate, consistent_rms=0.2)


def build_config(race, name, rate, seed, steps, changes):
    """Return the config of a run."""
    config, _, share, betas, decay, _ = RACES[race]
    warmup = max(1, round(steps * share))
    optimizer = optimizer_settings(name, rate, betas, decay, warmup)
    schedules = [
        dict(type="LinearLR", start_factor=0.01, by_epoch=False, end=warmup),
        dict(type="CosineAnnealingLR", by_epoch=False, begin=warmup, end=steps, eta_min_ratio=0.1),
    ]
    is_free = name == "schedule_free_adamw"
    settings = [
        f"optim_wrapper.optimizer={ {**optimizer, '_delete_': True}!r}",
        f"param_scheduler={[] if is_free else schedules!r}",
        f"train_cfg.max_iters={steps}",
        f"train_cfg.val_interval={max(1, steps // 4)}",
        "default_hooks.checkpoint=None",
        f"randomness.seed={seed}",
        *SETTINGS[race],
    ]
    if is_free:
        settings.append("custom_hooks=[{'type': 'ScheduleFreeHook'}]")
    return load_config(config, [*settings, *changes])


def train(race, name, rate, seed, steps, changes, directory):
    """Train once and return the line of the run."""
    cfg = build_config(race, name, rate, seed, steps, changes)
    cfg.work_dir = str(directory / f"{name}_{rate}_{seed}")
    wall, cpu = time.monotonic(), time.process_time()
    runner = Runner.from_cfg(cfg)
    runner.train()
    return dict(
        optimizer=name,
        rate=rate,
        seed=seed,
        steps=steps,
        wall=round(time.monotonic() - wall, 1),
        cpu=round(time.process_time() - cpu, 1),
        curve={str(iteration): metrics for _, iteration, metrics in runner.validations},
    )


def final(run, metric):
    """Return the metric after the last step; infinity for a run that diverged."""
    value = list(run["curve"].values())[-1][metric]
    return float(value) if value == value else float("inf")


def find_best(runs, name, metric):
    """Return the best rate of an optimizer with seed 0."""
    own = [run for run in runs if run["optimizer"] == name and run["seed"] == 0]
    return min(own, key=lambda run: final(run, metric))["rate"]


def print_tables(runs, metric):
    """Print the final metric by rate, and the curves at the best rate over the seeds."""
    rates = sorted({run["rate"] for run in runs})
    by_rate, curves, steps = [], [], []
    for name in dict.fromkeys(run["optimizer"] for run in runs):
        own = [run for run in runs if run["optimizer"] == name]
        found = {run["rate"]: f"{final(run, metric):.4f}" for run in own if run["seed"] == 0}
        by_rate.append([name, *(found.get(rate, "") for rate in rates)])
        best = find_best(runs, name, metric)
        seeds = [run for run in own if run["rate"] == best]
        steps = list(seeds[0]["curve"])
        values = [[float(run["curve"][step][metric]) for run in seeds] for step in steps]
        spread = [statistics.stdev(found) if len(found) > 1 else 0.0 for found in values]
        cells = [
            f"{statistics.mean(found):.3f} ± {deviation:.3f}"
            for found, deviation in zip(values, spread, strict=True)
        ]
        each = ", ".join(f"{value:.4f}" for value in values[-1])
        cpu = statistics.mean(run["cpu"] for run in own)
        curves.append([name, best, *cells, each, f"{cpu:.1f}"])
    print(table([f"{metric} by rate", *map(str, rates)], by_rate))
    print(table(["step", "rate", *steps, "each seed", "CPU s"], curves), flush=True)


def main(argv=None):
    """Run the race and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("race", choices=sorted(RACES))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--work-dir", default="work_dirs/race")
    args, changes = parser.parse_known_args(argv)
    _, steps, _, _, _, metric = RACES[args.race]
    steps = args.steps or steps
    directory = pathlib.Path(args.work_dir) / f"{args.race}_{steps}"
    directory.mkdir(parents=True, exist_ok=True)
    results = directory / "results.jsonl"
    runs = [json.loads(line) for line in results.open()] if results.exists() else []
    done = {(run["optimizer"], run["rate"], run["seed"]) for run in runs}

    def run_once(name, rate, seed):
        if (name, rate, seed) in done:
            return
        run = train(args.race, name, rate, seed, steps, changes, directory)
        with results.open("a") as file:
            file.write(json.dumps(run) + "\n")
        runs.append(run)
        print(name, rate, seed, run["curve"], run["wall"], run["cpu"], flush=True)

    for rate in args.rates:
        for name in args.optimizers:
            run_once(name, rate, 0)
    print_tables(runs, metric)
    for seed in range(1, args.seeds):
        for name in args.optimizers:
            run_once(name, find_best(runs, name, metric), seed)
    print_tables(runs, metric)


if __name__ == "__main__":
    main()
