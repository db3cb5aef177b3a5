"""Installs other trainers, each into an environment of its own under .bench, and compares what they add to a bare loop.

    python -m benchmarks.peers [NAME ...]

The overhead is what an iteration takes with the trainer less what it takes in a loop by hand in the same framework,
both in one process, in turns. A trainer that does not install or run stands in the table with the reason.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

from benchmarks.__main__ import HERE, write_section
from benchmarks.report import table

ENVIRONMENTS = HERE.parent / ".bench"
TITLE = "Peers: what a trainer adds to an iteration of a tiny network"


class Peer(NamedTuple):
    """A trainer: its name in the table, and what pip installs for it; nothing for the one of this project."""

    title: str
    requirements: tuple[str, ...]
    alone: tuple[str, ...] = ()  # installed without what they ask for, which pip does not resolve


TORCH = "torch==2.13.0"
KAULDRON = (
    *("absl-py", "altair", "chex", "clu", "einops", "etils[edc,enp,epath,epy,etree]", "flax", "grain", "graphviz"),
    *("immutabledict", "jax==0.10.2", "jaxtyping", "lark", "mediapy", "ml_collections", "optax", "orbax-checkpoint"),
    *("pandas", "scikit-image", "scikit-learn", "tabulate", "tensorboard", "tensorflow-cpu", "tensorflow_datasets"),
    *("tqdm", "typeguard", "opencv-python-headless", "setuptools<81"),
)
PEERS = {
    "jengine": Peer("jengine", ()),
    "keras": Peer("Keras 3 on JAX", ("keras", "jax==0.10.2")),
    "clu": Peer("CLU-style loop", ("clu", "jax==0.10.2", "flax", "optax", "tensorflow-cpu", "tensorboard")),
    "kauldron": Peer("Kauldron", KAULDRON, alone=("kauldron", "xmanager")),
    "lightning": Peer("Lightning, PyTorch", ("lightning", TORCH)),
    "mmengine": Peer("MMEngine, PyTorch", ("mmengine", TORCH, "setuptools<81")),
}


class Failed(Exception):
    """A trainer did not install or run."""


def run(command, **settings):
    """Runs a command; the last line of what it said goes into the error."""
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **settings)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise Failed(lines[-1].strip()[:90] if lines else f"ended with {done.returncode}")


def python_of(name):
    """The interpreter of a peer's environment, which is made if it is not there."""
    if not PEERS[name].requirements:
        return sys.executable
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        run([*pip, *PEERS[name].requirements], timeout=1800)
        if PEERS[name].alone:
            run([*pip, "--no-deps", *PEERS[name].alone], timeout=1800)
        (folder / "installed").touch()
    return str(python)


def measure(name):
    """What a peer's script wrote."""
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "times.json"
        run([python_of(name), "-m", f"benchmarks.peers.with_{name}", str(file)], cwd=HERE.parent, timeout=900)
        return json.loads(file.read_text())


def rows_of(title, found):
    """Return the rows of a trainer: one, or two with chunks of steps."""
    bare, *rest = found["times"].items()
    for kind, (wall, thread) in rest:
        name = f"{title} {found['version']}" + ("" if kind == "trainer" else f", {kind}")
        yield [name, f"{bare[1][0]:.1f}", f"{wall:.1f}", f"{wall - bare[1][0]:+.1f}", f"{thread - bare[1][1]:+.1f}"]


def main(argv=None):
    """Prints the table and keeps it in RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}; all by default")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(PEERS):
        parser.error(f"no peer is called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    rows, failures = [], []
    for name in args.names or PEERS:
        print(f"--- {PEERS[name].title}", flush=True)
        try:
            rows += rows_of(PEERS[name].title, measure(name))
        except (Failed, subprocess.TimeoutExpired) as error:
            failures.append(f"{PEERS[name].title}: {error}")
    text = table(["microseconds an iteration", "bare loop", "trainer", "more", "more, main thread"], rows)
    text = "\n".join([text, *failures])
    print(text)
    if not args.names:
        write_section(TITLE, text, ("jax",))


if __name__ == "__main__":
    main()
