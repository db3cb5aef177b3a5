"""Train configs on the accelerator and, at the same time, on the CPU, and compare their
accuracies.
"""

import os
import re
import subprocess
import sys
import tempfile

from benchmarks.accelerator.rows import record, record_close
from benchmarks.accelerator.size import is_tiny

CONFIGS = {
    "digits_cnn": ["--config.train_cfg.max_epochs=2", "--config.param_scheduler=None"],
    "digits_vit": [
        "--config.train_cfg.max_iters=60",
        "--config.train_cfg.val_interval=60",
        "--config.param_scheduler=None",
    ],
}
TOLERANCE = 0.02  # of the accuracy: 7 of the 359 images for validation


def start(config, directory, overrides, environment):
    """Start `jengine train`, with its output in a file."""
    command = [
        sys.executable,
        "-m",
        "jengine",
        "train",
        f"configs/{config}.py",
        "--work-dir",
        directory,
        *overrides,
    ]
    with open(f"{directory}.out", "w") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, "COLUMNS": "200"},
        )


def find_accuracies(text):
    """Return the accuracy of each validation in the output of a run."""
    return [
        float(value)
        for value in re.findall(r"(?:Epoch|Iter)\(val\).*accuracy/top1: ([\d.]+)", text)
    ]


def main():
    """Train both configs in both places, and record accuracies and devices."""
    tiny = is_tiny()
    with tempfile.TemporaryDirectory() as directory:
        runs = {}
        for config, shorter in CONFIGS.items():
            for where, environment in (("accelerator", {}), ("cpu", {"JAX_PLATFORMS": "cpu"})):
                path = os.path.join(directory, f"{config}_{where}")
                runs[config, where] = (
                    start(config, path, shorter if tiny else [], environment),
                    path,
                )
        outputs = {}
        for (config, where), (process, path) in runs.items():
            code = process.wait()
            with open(f"{path}.out") as file:
                outputs[config, where] = file.read()
            if code:
                record(
                    f"{config}, {where}: `jengine train`", f"exit code {code}", "exit code 0", False
                )
                print(outputs[config, where][-4000:], flush=True)
        for config in CONFIGS:
            accuracies = {
                where: find_accuracies(outputs[config, where]) for where in ("accelerator", "cpu")
            }
            if not all(accuracies.values()):
                continue
            device = re.search(r"devices: +(.*)", outputs[config, "accelerator"])
            record(
                f"{config}: device in the log",
                device[1].strip() if device else "none",
                "a name",
                bool(device),
            )
            ends = {where: values[-1] for where, values in accuracies.items()}
            record(f"{config}: accuracy", ends["accelerator"])
            record(f"{config}: accuracy on the CPU", ends["cpu"])
            record_close(
                f"{config}: |difference|",
                abs(ends["accelerator"] - ends["cpu"]),
                1.0 if tiny else TOLERANCE,
            )
        for (config, where), text in outputs.items():
            if rate := re.search(r"([\d.,]+) iterations/s", text):
                record(f"{config}, {where}: iterations/s", float(rate[1].replace(",", "")))


if __name__ == "__main__":
    main()
