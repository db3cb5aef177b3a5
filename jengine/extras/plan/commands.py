"""The command `jengine plan`."""

from jengine.cli.parser import Commands


def add_commands(commands: Commands) -> None:
    """Add `plan`."""
    text = "print memory, sharding, collectives and estimated time on many devices"
    plan = commands.add("plan", "jengine.extras.plan.plan:run", text, commands.config)
    devices = plan.add_mutually_exclusive_group(required=True)
    devices.add_argument(
        "--devices", type=int, metavar="N", help="number of CPU devices to compile for"
    )
    chips = "chips to compile for: v5e:16x16, v5p:2x2x1, v6e:2x2, h100:8, a100:8, b200:8"
    devices.add_argument("--topology", metavar="CHIP:SHAPE", help=chips)
    plan.add_argument(
        "--slices", type=int, metavar="N", help="number of TPU slices of --topology (default: 1)"
    )
    mesh = (
        "number of devices along data, fsdp, expert, context, tensor, or axes of the config; "
        "slices.AXIS=N: of slices"
    )
    plan.add_argument("--mesh", metavar="AXIS=N,...", help=mesh)
    processes = (
        "number of processes, each of which reads batch_size examples (default: the hosts of the "
        "topology, or 1)"
    )
    plan.add_argument("--processes", type=int, metavar="P", help=processes)
    search = (
        "try meshes, rematerialization and batch sizes on the chips of --topology, and rank those "
        "that fit; 'batch': only batch sizes, for the largest that fits"
    )
    plan.add_argument("--search", nargs="?", const="all", choices=("all", "batch"), help=search)
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
