"""Install other trainers, each in its own environment under .bench, and measure their overhead over
a bare loop.

    python -m benchmarks.peers [NAME ...] [--accept]
    python -m benchmarks.peers --whole [NAME ...] [--rounds 3] [--accept]

`--whole` measures whole processes instead, from the command to the final metric, for three tasks.

The overhead is the time per iteration with the trainer minus the time in a hand-written loop in the
same framework, measured in turns in one process. Trainers that fail to install or run are listed
below the table with the reason.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

from benchmarks.__main__ import HERE, write_section
from benchmarks.peers.whole import run as whole
from benchmarks.report import table

ENVIRONMENTS = HERE.parent / ".bench"
TITLE = "Peers: overhead per iteration of a tiny network"


class Peer(NamedTuple):
    """Describe a trainer: its name in the table, and its pip requirements (none for the trainer
    of this project).
    """

    title: str
    requirements: tuple[str, ...]
    # installed with --no-deps, because pip cannot resolve their dependencies
    without_deps: tuple[str, ...] = ()


TORCH = "torch==2.13.0"
KAULDRON = (
    *(
        "absl-py",
        "altair",
        "chex",
        "clu",
        "einops",
        "etils[edc,enp,epath,epy,etree]",
        "flax",
        "grain",
        "graphviz",
    ),
    *(
        "immutabledict",
        "jax==0.10.2",
        "jaxtyping",
        "lark",
        "mediapy",
        "ml_collections",
        "optax",
        "orbax-checkpoint",
    ),
    *(
        "pandas",
        "scikit-image",
        "scikit-learn",
        "tabulate",
        "tensorboard",
        "tensorflow-cpu",
        "tensorflow_datasets",
    ),
    *("tqdm", "typeguard", "opencv-python-headless", "setuptools<81"),
)
PEERS = {
    "jengine": Peer("jengine", ()),
    "keras": Peer("Keras 3 on JAX", ("keras", "jax==0.10.2")),
    "clu": Peer(
        "CLU-style loop", ("clu", "jax==0.10.2", "flax", "optax", "tensorflow-cpu", "tensorboard")
    ),
    "kauldron": Peer("Kauldron", KAULDRON, without_deps=("kauldron", "xmanager")),
    "lightning": Peer("Lightning, PyTorch", ("lightning", TORCH)),
    "hf": Peer("HF Trainer, PyTorch", ("transformers", "accelerate", TORCH)),
    "mmengine": Peer("MMEngine, PyTorch", ("mmengine", TORCH, "setuptools<81")),
}


class PeerError(Exception):
    """Signal that a trainer failed to install or run."""


def run(command, **settings):
    """Run a command; on failure, raise PeerError with the last line of its stderr."""
    result = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **settings
    )
    if result.returncode:
        lines = [
            line
            for line in result.stderr.splitlines()
            if line.strip() and not line.startswith("WARNING")
        ]
        raise PeerError(lines[-1].strip()[:90] if lines else f"exit code {result.returncode}")


def ensure_environment(name):
    """Create the environment of a peer if necessary, and return its interpreter."""
    if not PEERS[name].requirements:
        return sys.executable
    directory = ENVIRONMENTS / name
    python = directory / "bin" / "python"
    if not (directory / "installed").exists():
        run([sys.executable, "-m", "venv", str(directory)])
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        run([*pip, *PEERS[name].requirements], timeout=1800)
        if PEERS[name].without_deps:
            run([*pip, "--no-deps", *PEERS[name].without_deps], timeout=1800)
        (directory / "installed").touch()
    return str(python)


def measure(name):
    """Run the script of a peer and return its results."""
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "times.json"
        run(
            [ensure_environment(name), "-m", f"benchmarks.peers.with_{name}", str(file)],
            cwd=HERE.parent,
            timeout=900,
        )
        return json.loads(file.read_text())


def make_rows(title, results):
    """Yield the table rows of a trainer: one, or two with chunks of steps."""
    (_, (bare_wall, bare_thread)), *loops = results["times"].items()
    for kind, (wall, thread) in loops:
        name = f"{title} {results['version']}" + ("" if kind == "trainer" else f", {kind}")
        yield [
            name,
            f"{bare_wall:.1f}",
            f"{wall:.1f}",
            f"{wall - bare_wall:+.1f}",
            f"{thread - bare_thread:+.1f}",
        ]


def main(argv=None):
    """Measure the peers, print the table, and write it to the results if all peers were
    measured.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of {', '.join(PEERS)}; all by default"
    )
    parser.add_argument(
        "--accept", action="store_true", help="replace the table in benchmarks/RESULTS.md"
    )
    parser.add_argument("--whole", action="store_true", help="measure whole processes")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each whole process")
    args = parser.parse_args(argv)
    # the Trainer has no measurement of single iterations
    known = list(whole.SYSTEMS) if args.whole else [name for name in PEERS if name != "hf"]
    if unknown := set(args.names) - set(known):
        parser.error(
            f"unknown peers: {', '.join(sorted(unknown))}; expected any of {', '.join(known)}"
        )
    if args.whole:
        text = whole.main(args.names, args.rounds, ensure_environment)
        print(text)
        if not args.names:
            write_section(whole.TITLE, text, ("jax",), args.accept)
        return
    rows = []
    failures = []
    for name in args.names or known:
        print(f"--- {PEERS[name].title}", flush=True)
        try:
            rows += make_rows(PEERS[name].title, measure(name))
        except (PeerError, subprocess.TimeoutExpired) as error:
            failures.append(f"{PEERS[name].title}: {error}")
    text = table(
        ["microseconds per iteration", "bare loop", "trainer", "overhead", "overhead, main thread"],
        rows,
    )
    text = "\n".join([text, *failures])
    print(text)
    if not args.names:
        write_section(TITLE, text, ("jax",), args.accept)


if __name__ == "__main__":
    main()
