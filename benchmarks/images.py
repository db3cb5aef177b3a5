"""Measure how fast images are decoded from PNG files and collated, compared with grain, PyTorch and
tf.data.

    python -m benchmarks.images [--files 20000] [--rounds 3] [--parallel 2] [--json FILE]

The files (96 x 96 pixels, about 25 KB each) are written to a temporary directory. The loaders take
turns, block by block, from endless streams of batches of 64 examples; the time to the first batch
is measured on its own. PyTorch and tf.data are measured if they are installed. The last table is a
Runner that trains a convolutional network on the files.
"""

import argparse
import functools
import tempfile
import time

import jax.numpy as jnp
from flax import linen as nn

from benchmarks import png_files
from benchmarks.by_runner import discard_terminal_output
from benchmarks.png_files import BATCH_SIZE, is_installed
from benchmarks.report import table, write_ratios
from benchmarks.timing import compare
from jengine import Runner
from jengine.extras.networks.networks import SmallCNN
from jengine.model import CrossEntropy, LinenModel

# batches; several times as many as are built ahead while another loader is measured
BLOCK = 60
TURNS = 3
TRAIN_BATCHES = 60


class ImageCNN(nn.Module):
    """Scale images to 0 to 1 and half their size on the device, and classify them."""

    @nn.compact
    def __call__(self, image, train=False):
        """Return logits f[B, 10] of images uint8[B, H, W, 3]."""
        return SmallCNN(widths=(16, 32))(
            nn.avg_pool(image.astype(jnp.float32) / 255, (2, 2), (2, 2)), train
        )


def start(make_batches):
    """Return a function that takes the given number of batches, and the seconds to the first."""
    begin = time.perf_counter()
    batches = make_batches()
    next(batches)

    def take(count):
        for _ in range(count):
            next(batches)

    return take, time.perf_counter() - begin, batches.close


def compare_loaders(kinds, rounds):
    """Measure loaders in turns; return rows of the table and the ratios to the first."""
    started = {name: start(make_batches) for name, make_batches in kinds.items()}
    times = compare({name: take for name, (take, _, _) in started.items()}, BLOCK, TURNS, rounds)
    for _, _, close in started.values():
        close()
    rows = [
        [name, f"{BATCH_SIZE / time.wall * 1e6:,.0f}", time.ratio, f"{started[name][1]:.1f}"]
        for name, time in times.items()
    ]
    return rows, {name: time.ratio.median for name, time in times.items()}


def train(paths, work_dir, iters=TRAIN_BATCHES, **settings):
    """Train the network on the files for some iterations; return the seconds of each phase."""
    runner = Runner(
        LinenModel(ImageCNN(), CrossEntropy()),
        work_dir,
        train_dataloader=dict(dataset=png_files.PngFiles(paths), batch_size=BATCH_SIZE, **settings),
        train_cfg=dict(by_epoch=False, max_iters=iters),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.05, momentum=0.9)),
        default_hooks=dict(checkpoint=None),
        log_level="WARNING",
    )
    runner.train()
    seconds = runner.stopwatch.report()
    runner.close()
    runner.train_dataloader.close()
    return seconds


def main(argv=None):
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--parallel", type=int, default=2, help="threads, or worker processes, of each loader"
    )
    parser.add_argument("--json", help="file to write the ratios to")
    args = parser.parse_args(argv)
    discard_terminal_output()
    count = args.parallel
    ratios = {}
    with tempfile.TemporaryDirectory() as directory:
        paths = png_files.write_files(directory, args.files)
        make = {
            name: functools.partial(function, paths)
            for name, function in {
                "grain": png_files.grain_batches,
                "jengine": png_files.jengine_batches,
                "torch": png_files.torch_batches,
                "tensorflow": png_files.tensorflow_batches,
            }.items()
        }
        kinds = {
            "threads": {
                "grain": functools.partial(make["grain"], threads=count),
                "jengine": functools.partial(make["jengine"], num_threads=count),
                "tf.data, own decoder": functools.partial(make["tensorflow"], threads=count),
            },
            "workers": {
                "grain": functools.partial(make["grain"], workers=count),
                "jengine": functools.partial(make["jengine"], num_workers=count),
                "PyTorch": functools.partial(make["torch"], workers=count),
            },
        }
        if not is_installed("tensorflow"):
            del kinds["threads"]["tf.data, own decoder"]
        if not is_installed("torch"):
            del kinds["workers"]["PyTorch"]
        for kind, loaders in kinds.items():
            rows, measured = compare_loaders(loaders, args.rounds)
            print(
                table(
                    [
                        f"{count} {kind}",
                        "images/s",
                        "time, ratio to grain",
                        "seconds to the first batch",
                    ],
                    rows,
                )
            )
            print()
            ratios |= {
                f"images, {kind}, {name}": ratio
                for name, ratio in measured.items()
                if name == "jengine"
            }
        rows = []
        for kind in kinds:
            seconds = train(paths, f"{directory}/{kind}", **{f"num_{kind}": count})
            step = seconds.get("step", 0.0)
            waited = seconds.get("input", 0.0)
            steady = sum(
                value for phase, value in seconds.items() if phase not in ("setup", "compile")
            )
            rows.append(
                [
                    f"{count} {kind}",
                    f"{seconds['setup']:.1f}",
                    f"{seconds['compile']:.1f}",
                    f"{step:.1f}",
                    f"{waited:.2f}",
                    f"{waited / steady:.1%}",
                ]
            )
    print(
        table(
            [
                f"Runner, {TRAIN_BATCHES} steps",
                "setup s",
                "compile s",
                "step s",
                "input s",
                "input share",
            ],
            rows,
        )
    )
    write_ratios(args.json, ratios)


if __name__ == "__main__":
    main()
