"""The command `jengine sweep`."""

from jengine.cli.parser import Commands


def add_commands(commands: Commands) -> None:
    """Add `sweep`."""
    sweep = commands.add(
        "sweep",
        "jengine.extras.sweeps.sweep_command:run",
        "train many variants of a config, and compare them",
        commands.config,
    )
    text = "values of one path; all combinations are run. The path may be shortened: lr=1e-3,1e-2"
    sweep.add_argument(
        "--grid", nargs="+", action="extend", default=[], metavar="PATH=A,B,...", help=text
    )
    text = (
        "range of a number, for --random and --search, such as lr=1e-4..1e-1:log; with :int for "
        "integers"
    )
    sweep.add_argument(
        "--range", nargs="+", action="extend", default=[], metavar="PATH=LOW..HIGH", help=text
    )
    number = sweep.add_mutually_exclusive_group()
    number.add_argument(
        "--random", type=int, default=0, metavar="N", help="draw N settings at random"
    )
    number.add_argument(
        "--search", type=int, default=0, metavar="N", help="let Optuna choose N settings"
    )
    sweep.add_argument(
        "--seeds", type=int, default=0, metavar="N", help="run each setting with the seeds 0 to N-1"
    )
    sweep.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at the same time (default: 1)"
    )
    text = (
        "end a run that takes longer, such as 90m: it is saved, and counts as failed (default: no "
        "limit)"
    )
    sweep.add_argument("--max-time", metavar="TIME", help=text)
    text = "the metric to search for (default: the first of save_best)"
    sweep.add_argument("--metric", metavar="NAME", help=text)
    sweep.add_argument(
        "--work-dir", metavar="DIR", help="the sweep's directory (default: work_dirs/CONFIG_sweep)"
    )
    text = "where the runs are: local (default), submitit (SLURM arrays) or ray"
    sweep.add_argument(
        "--launcher", dest="sweep_launcher", default="local", metavar="NAME", help=text
    )
    text = "an option of the launcher, such as slurm_partition=gpu or num_gpus=1; may be repeated"
    sweep.add_argument(
        "--launcher-option", action="append", default=[], metavar="NAME=VALUE", help=text
    )
