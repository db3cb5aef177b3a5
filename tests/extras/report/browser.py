"""Open a page in Chromium and run scripts in it, over the DevTools protocol."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import threading

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Page:
    """Page in a browser without a network."""

    def __init__(self, requests, answers):
        self._requests, self._answers, self._ids, self._rest = requests, answers, itertools.count(1), b""
        self._session = None

    def call(self, method, **params):
        """Call a method of the protocol and return its result; events are dropped."""
        message = {"id": next(self._ids), "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                received = os.read(self._answers, 1 << 16)
                assert received, "the browser ended"
                self._rest += received
            text, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path, width, height):
        """Open a file in a window of a size."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        source = "window.errors = []; addEventListener('error', event => errors.push(event.message));"
        self.call("Page.addScriptToEvaluateOnNewDocument", source=source)
        self.call("Page.navigate", url=path.as_uri())

    def run(self, script):
        """Run the body of an async function and return what it returns."""
        wrapped = f"(async () => {{ {script} }})()"
        found = self.call("Runtime.evaluate", expression=wrapped, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def save_picture(self, path):
        """Write what the window shows to a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def open_page(path, profile, width=1400, height=1200):
    """Yield a page in a new browser, which keeps its files in `profile`."""
    (commands, requests), (answers, events) = os.pipe(), os.pipe()
    arguments = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars",
    ]  # fmt: skip
    # The browser reads from descriptor 3 and writes to 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{events}', "bash", *arguments]
    process = subprocess.Popen(shell, pass_fds=(commands, events), stderr=subprocess.DEVNULL)
    os.close(commands)
    os.close(events)
    watch = threading.Timer(60, process.kill)
    watch.start()
    try:
        page = Page(requests, answers)
        page.open(path, width, height)
        yield page
    finally:
        watch.cancel()
        process.terminate()
        process.wait(10)
        os.close(requests)
        os.close(answers)
