"""Run code in new processes that need not import JAX again: forks of one that has imported it."""

import atexit
import functools
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).parent.parent
# A second fork waits for a process that runs beside others, and writes its id and exit code to a named pipe.
SERVER = """
import json, os, sys
others = 0
{prepare}
for line in sys.stdin:
    while others and os.waitpid(-1, os.WNOHANG)[0]: others -= 1
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    if "pipe" in request:
        others += 1
    else:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    while others: others -= bool(os.wait())
    sys.exit()
if "pipe" in request:
    pipe = os.open(request["pipe"], os.O_WRONLY)
    child = os.fork()
    if child:
        os.write(pipe, child.to_bytes(4, "little", signed=True))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(pipe, code.to_bytes(4, "little", signed=True))
        os._exit(0)
    os.close(pipe)
os.chdir(request["cwd"])
settings = [(n, v) for n, v in request["env"].items() if n.startswith("JAX_") and os.environ.get(n) != v]
os.environ.clear()
os.environ.update(request["env"])
for number, path in enumerate([os.devnull, *request["outputs"]]):
    os.dup2(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), number)
for name, text in settings:  # which JAX has read at its import
    kind = type(jax.config.values[name.lower()])
    jax.config.update(name.lower(), text.lower() in ("1", "true") if kind is bool else int(text) if kind is int else text)
sys.argv = ["-c", *request["args"]]
exec(compile(request["code"], "<string>", "exec"), globals())
"""
OTHER_PACKAGES = """
import flax.linen, flax.nnx, grain, jax, ml_collections, optax, orbax.checkpoint, rich
from tests.forks import share_context
share_context()
assert "jengine" not in sys.modules
"""


def share_context():
    """Let all programs of this process share a context of MLIR.

    To make and delete one takes longer than to lower most programs of the tests; each program keeps its own, a megabyte, alive.
    """
    import jax._src.interpreters.mlir as mlir

    if hasattr(mlir, "make_ir_context"):  # as in JAX 0.10; others only take longer
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)


class Fork:
    """A process that runs, with the methods of `subprocess.Popen`."""

    def __init__(self, pipe):
        self._pipe = pipe
        self._lock = threading.Lock()
        self.pid = int.from_bytes(os.read(pipe, 4), "little", signed=True)
        self.returncode = None

    def __del__(self):
        os.close(self._pipe)

    def wait(self, timeout=None):
        if not select.select([self._pipe], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        with self._lock:
            if self.returncode is None:
                code = os.read(self._pipe, 4)
                self.returncode = int.from_bytes(code, "little", signed=True)
                os.write(self._pipe, code)  # for other threads that wait
        return self.returncode

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, signum):
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Forks:
    """A process that has run `prepare`, and starts others as `python -c` does."""

    def __init__(self, prepare=OTHER_PACKAGES):
        command = [sys.executable, "-c", SERVER.format(prepare=prepare)]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # JAX warns of each fork
        self._server = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)

    def close(self):
        self._server.communicate()

    def __call__(self, code, *args, cwd=ROOT, env=None):
        """Run code, and return a `CompletedProcess`."""
        with tempfile.NamedTemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w+") as err:
            self._request(code, args, cwd, env, outputs=[out.name, err.name])
            return subprocess.CompletedProcess(code, int(self._server.stdout.readline()), out.read(), err.read())

    def start(self, code, *args, output, cwd=ROOT, env=None):
        """Start code, and return a `Fork`; what it prints is appended to the file `output`."""
        with tempfile.TemporaryDirectory() as directory:
            os.mkfifo(f"{directory}/pipe")
            pipe = os.open(f"{directory}/pipe", os.O_RDWR)  # for reading alone, this would wait for the other end
            self._request(code, args, cwd, env, outputs=[str(output)] * 2, pipe=f"{directory}/pipe")
            return Fork(pipe)

    def _request(self, code, args, cwd, env, **more):
        environment = {name: str(value) for name, value in (os.environ if env is None else env).items()}
        request = dict(code=code, args=list(map(str, args)), cwd=str(cwd), env=environment, **more)
        print(json.dumps(request), file=self._server.stdin, flush=True)


@functools.cache
def forks():
    """Return the process that has imported the packages that jengine needs, and not jengine; it ends with this one."""
    server = Forks()
    atexit.register(server.close)
    return server


def start_script(path, *args, **more):
    """Start a script with arguments, see `Forks.start`."""
    return forks().start(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')", *args, **more)


def start_module(name, *args, **more):
    """Start a module with arguments, see `Forks.start`."""
    return forks().start(f"import runpy; runpy.run_module({name!r}, run_name='__main__')", *args, **more)
