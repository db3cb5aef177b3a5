"""Race optimizers on a config: each at the best of five learning rates, with three seeds.

    python -m benchmarks.race lm [--steps 1600] [--seeds 3] [--work-dir DIR] [PATH=VALUE ...]

The rates are compared by `jengine sweep` with seed 0, then the best one is trained with the other
seeds. All optimizers have the same steps, rates, clipping and decayed parameters. The same command
continues a race that was interrupted; results.jsonl in the work dir has a line for each run.
`PATH=VALUE` sets values in the config, such as `train_dataloader.batch_size=4`.
"""

import argparse
import json
import pathlib
import statistics
import time

import jengine
from benchmarks.report import table
from jengine.extras.report.run_files import read_run
from jengine.extras.report.run_metrics import read_curves

RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
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
OPTIMIZERS = ("AdamW", "Muon", "NorMuon", "SOAP", "schedule_free_adamw")


def optimizer_settings(name, betas, decay, warmup):
    """Return the settings of an optimizer but its learning rate."""
    if name == "AdamW":
        return dict(type=name, betas=betas, weight_decay=decay)
    if name == "schedule_free_adamw":
        return dict(type=name, b1=betas[0], b2=betas[1], weight_decay=decay, warmup_steps=warmup)
    own = dict(type=name, weight_decay=decay, adam_weight_decay=decay)
    if name == "SOAP":
        return dict(**own, betas=(0.95, betas[1]))
    # updates as large as AdamW's, so that the same rates fit
    return dict(**own, adam_b1=betas[0], adam_b2=betas[1], consistent_rms=0.2)


def overrides(race, name, steps):
    """Return the overrides of an optimizer, without its learning rate."""
    _, _, share, betas, decay, _ = RACES[race]
    warmup = max(1, round(steps * share))
    optimizer = optimizer_settings(name, betas, decay, warmup)
    schedules = [
        dict(type="LinearLR", start_factor=0.01, by_epoch=False, end=warmup),
        dict(type="CosineAnnealingLR", by_epoch=False, begin=warmup, end=steps, eta_min_ratio=0.1),
    ]
    changes = [
        f"optim_wrapper.optimizer={ {**optimizer, '_delete_': True}!r}",
        f"param_scheduler={schedules!r}",
        f"train_cfg.max_iters={steps}",
        f"train_cfg.val_interval={max(1, steps // 5)}",
        "default_hooks.checkpoint=None",
        *SETTINGS[race],
    ]
    if name == "schedule_free_adamw":
        changes += ["param_scheduler=[]", "custom_hooks=[{'type': 'ScheduleFreeHook'}]"]
    return changes


def read_results(name, swept, metric):
    """Return a line for each run of a sweep: rate, seed, final metrics, and the curve."""
    lines = []
    for row in swept.rows:
        curves = read_curves(read_run(pathlib.Path(row.log_dir)).rows)[0] if row.log_dir else {}
        rates = [value for path, value in row.hyperparams.items() if path.endswith(("lr", "rate"))]
        lines.append(
            dict(
                optimizer=name,
                lr=rates[0] if rates else None,
                seed=row.seed,
                status=row.status,
                error=row.error,
                final=row.final,
                curve=curves.get(("val", metric)),
            )
        )
    return lines


def race_one(race, name, steps, seeds, changes, directory):
    """Train an optimizer with all rates, and with all seeds at the best; return the lines."""
    config, metric = RACES[race][0], RACES[race][-1]
    path = "learning_rate" if name == "schedule_free_adamw" else "lr"
    rate = f"optim_wrapper.optimizer.{path}"
    settings = [*overrides(race, name, steps), *changes]
    swept = jengine.sweep(
        config, grid={rate: RATES}, seeds=[0], overrides=settings, work_dir=directory / name
    )
    lines = read_results(name, swept, metric)
    best = min(
        (line for line in lines if line["curve"]),
        key=lambda line: line["curve"][1][-1],
    )
    if seeds > 1:
        swept = jengine.sweep(
            config,
            grid={rate: [best["lr"]]},
            seeds=list(range(1, seeds)),
            overrides=settings,
            work_dir=directory / f"{name}_seeds",
        )
        lines += [{**line, "lr": best["lr"]} for line in read_results(name, swept, metric)]
    return lines, best["lr"]


def main(argv=None):
    """Run the race and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("race", choices=sorted(RACES))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--work-dir", default="work_dirs/race")
    args, changes = parser.parse_known_args(argv)
    steps = args.steps or RACES[args.race][1]
    directory = pathlib.Path(args.work_dir) / f"{args.race}_{steps}"
    directory.mkdir(parents=True, exist_ok=True)
    rates, curves = [], []
    for name in args.optimizers:
        start = time.monotonic()
        lines, best = race_one(args.race, name, steps, args.seeds, changes, directory)
        with (directory / "results.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        finals = {line["lr"]: line["curve"][1][-1] for line in lines if line["seed"] == 0}
        rates.append([name, *(f"{finals.get(rate, float('nan')):.4f}" for rate in RATES)])
        found = [line["curve"] for line in lines if line["lr"] == best and line["curve"]]
        values = zip(*(curve[1] for curve in found), strict=True)
        spread = [(statistics.mean(v), statistics.stdev(v) if len(v) > 1 else 0.0) for v in values]
        curves.append(
            [name, best, *(f"{mean:.3f} ± {deviation:.3f}" for mean, deviation in spread)]
        )
        print(table(["rate", *RATES], rates))
        print(table(["step", "rate", *map(int, found[0][0])], curves))
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
