"""Check the files of examples/launch: scripts run with recorded commands, manifests against Kubernetes' models."""

import os
import pathlib
import shlex
import subprocess

import pytest

from jengine.cli.parser import build_parser

LAUNCH = pathlib.Path(__file__).parents[2] / "examples" / "launch"


def run(script, *args, path, **codes):
    """Run a script with recorded commands that end with the given codes; return its exit code and the commands."""
    for name in ("srun", "scontrol", "mpirun", "gcloud"):
        command = path / name
        reply = "case $* in *'value(state.state)'*) echo ACTIVE;; esac\n" if name == "gcloud" else ""
        command.write_text(f'#!/bin/bash\necho "{name} $*" >> {path}/log\n{reply}exit {codes.get(name, 0)}\n')
        command.chmod(0o755)
    environ = {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    done = subprocess.run(["bash", LAUNCH / script, *map(str, args)], env=environ, timeout=60)
    return done.returncode, (path / "log").read_text().splitlines()


def parse(command):
    """Return the arguments of the `jengine` command in a line, as the command line parses them."""
    words = shlex.split(command)
    return build_parser().parse_args(words[words.index("jengine") + 1 :])


def test_slurm_requeues_a_run_that_was_stopped_and_saved(tmp_path):
    code, log = run("slurm.sh", "cfg.py", "runs/a", path=tmp_path, srun=143)
    assert code == 143
    assert log[1:] == ["scontrol requeue 42"]
    args = parse(log[0])
    assert (args.launcher, args.work_dir, args.resume) == (None, "runs/a", True)


@pytest.mark.parametrize("code", [0, 1])
def test_slurm_does_not_requeue_a_run_that_ended_or_failed(code, tmp_path):
    assert run("slurm.sh", "cfg.py", "runs/a", path=tmp_path, srun=code)[0] == code
    assert "scontrol" not in (tmp_path / "log").read_text()


def test_mpi_takes_the_first_host_as_coordinator(tmp_path):
    (tmp_path / "hosts").write_text("# two hosts\nnode7 slots=4\nnode8 slots=4\n")
    code, log = run("mpi.sh", tmp_path / "hosts", 8, "cfg.py", "runs/a", path=tmp_path)
    assert code == 0
    assert parse(log[0]).coordinator == "node7:12345"


def test_a_queued_resource_that_exists_is_used_again(tmp_path):
    code, log = run("tpu_queued_resource.sh", "tpu", "zone", "v5litepod-16", "cfg.py", "runs/a", path=tmp_path)
    assert code == 0
    assert not [line for line in log if " create " in line]
    assert "jengine train 'cfg.py' --work-dir 'runs/a' --resume --launcher tpu" in log[-1]
    assert "--worker=all" in log[-1]


def test_a_missing_queued_resource_is_created(tmp_path):
    # `describe` fails, so the script creates one; the stand-in fails there too, and the script ends
    code, log = run("tpu_queued_resource.sh", "tpu", "zone", "v5litepod-16", "cfg.py", "a", path=tmp_path, gcloud=1)
    assert code == 1
    assert "queued-resources create tpu --node-id tpu --zone zone --accelerator-type v5litepod-16" in log[-1]


@pytest.mark.parametrize(("name", "launcher"), [("kubernetes_job.yaml", "kubernetes"), ("jobset.yaml", "tpu")])
def test_the_containers_run_a_command_that_starts_or_continues(name, launcher):
    *_, manifest = yaml_documents(name)
    args = parse(shlex.join(container(job_spec(manifest))["command"]))
    assert (args.launcher, args.resume) == (launcher, True)


@pytest.mark.foreign
@pytest.mark.parametrize("name", ["kubernetes_job.yaml", "jobset.yaml"])
def test_manifests_have_only_fields_of_the_kubernetes_models(name):
    client = pytest.importorskip("kubernetes.client")
    for document in yaml_documents(name):
        if document["kind"] == "JobSet":  # a custom resource, which contains Jobs
            check_fields(client, "V1ObjectMeta", document["metadata"])
            check_fields(client, "V1JobSpec", job_spec(document))
        else:
            check_fields(client, "V1" + document["kind"], document)


def yaml_documents(name):
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def job_spec(manifest):
    if manifest["kind"] == "JobSet":
        return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    return manifest["spec"]


def container(spec):
    return spec["template"]["spec"]["containers"][0]


def check_fields(client, kind, value):
    """Check that each key is a field of the client's model `kind`, which has a table of types by attribute."""
    if kind.startswith("list["):
        for item in value:
            check_fields(client, kind[5:-1], item)
    elif hasattr(client, kind):
        model = getattr(client, kind)
        types = {key: model.openapi_types[attribute] for attribute, key in model.attribute_map.items()}
        for key, item in value.items():
            assert key in types, f"{kind} has no field {key!r}"
            check_fields(client, types[key], item)
