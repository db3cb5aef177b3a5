"""Run code in new processes that need not import JAX again: forks of one that has imported it."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
SERVER = """
import json, os, sys
{prepare}
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(request["cwd"])
os.environ.clear()
os.environ.update(request["env"])
for number, path in enumerate([os.devnull, *request["outputs"]]):
    os.dup2(os.open(path, os.O_RDWR), number)
sys.argv = ["-c", *request["args"]]
exec(compile(request["code"], "<string>", "exec"), globals())
"""
OTHER_PACKAGES = """
import flax.linen, flax.nnx, grain, jax, ml_collections, optax, orbax.checkpoint, rich
assert "jengine" not in sys.modules
"""


@contextlib.contextmanager
def forks(prepare=OTHER_PACKAGES):
    """Yield a function that runs code as `python -c` does, after `prepare`, and returns a `CompletedProcess`.

    The settings of JAX are those of this process: it has read its environment variables at its import.
    """
    command = [sys.executable, "-c", SERVER.format(prepare=prepare)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # JAX warns of each fork
    server = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)

    def run(code, *args, cwd=ROOT, env=None):
        with tempfile.NamedTemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w+") as err:
            environment = {name: str(value) for name, value in (os.environ if env is None else env).items()}
            request = dict(code=code, args=list(map(str, args)), cwd=str(cwd), env=environment, outputs=[out.name, err.name])
            print(json.dumps(request), file=server.stdin, flush=True)
            return subprocess.CompletedProcess(code, int(server.stdout.readline()), out.read(), err.read())

    try:
        yield run
    finally:
        server.communicate()
