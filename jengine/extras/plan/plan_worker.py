"""Process that compiles a config's programs for chips that this machine does not have.

    python -m jengine.extras.plan.plan_worker REQUEST RESULTS

A failed check within XLA ends the process, and the environment must be set before JAX is imported.
REQUEST is JSON, see `plan_process.compile_candidates`; RESULTS is a file that gets one line of JSON
for each candidate.
"""

import json
import logging.handlers
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from jengine.config.containers import resolve
from jengine.config.errors import ConfigError
from jengine.config.load import load_config
from jengine.extras.plan.plan import scale_batches, set_devices
from jengine.extras.plan.program_costs import compile_plan
from jengine.extras.plan.topologies import Topology, parse_topology
from jengine.parallel.mesh import build_mesh


def main(request: Mapping[str, Any], path: str) -> None:
    """Compile the candidates, and add the result of each to the file at `path`."""
    topology = parse_topology(request["topology"], request["slices"])
    log = logging.handlers.BufferingHandler(sys.maxsize)
    log.setLevel(logging.WARNING)
    logging.getLogger("jengine").addHandler(log)
    for candidate in request["candidates"]:
        log.flush()
        try:
            result: dict[str, Any] = {"plan": _compile(request, candidate, topology)}
            result["warnings"] = [record.getMessage() for record in log.buffer]
        except Exception as error:
            text = "\n  ".join(
                [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
            )
            result = {"error": text, "traceback": traceback.format_exc()}
        # Appended at once: a failed check of the next candidate would end the process without
        # flushing a buffer.
        with open(path, "a") as file:
            file.write(json.dumps(result) + "\n")


def _compile(
    request: Mapping[str, Any], candidate: Mapping[str, Any], topology: Topology
) -> dict[str, Any]:
    cfg = resolve(load_config(request["config"], [*request["overrides"], *candidate["overrides"]]))
    # Descriptions without hardware, for which XLA compiles; nothing can run on them.
    devices = topology.devices()
    hosts = len({device.process_index for device in devices})
    processes = request["processes"] or hosts
    # Each host feeds its own chips, so that a process cannot serve two of them.
    if processes % hosts:
        raise ConfigError(
            f"--processes must be a multiple of the {hosts} hosts of {topology}, got {processes}"
        )
    cfg = set_devices(cfg, len(devices), candidate["mesh"])
    parallel = {name: value for name, value in cfg["parallel"].items() if name != "devices"}
    mesh = build_mesh(parallel.get("mesh"), devices, parallel.get("batch_axes"))
    cfg = scale_batches({**cfg, "parallel": {**parallel, "mesh": mesh}}, mesh, processes)
    plan = compile_plan(cfg, topology.chip, training_only=request["training_only"])
    chip = {
        "topology": str(topology),
        "chip": topology.chip.kind,
        "chip_memory": topology.chip.memory,
    }
    return {**chip, "processes": processes, **plan}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
