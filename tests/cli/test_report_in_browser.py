import json
import re
import shutil
import subprocess

import pytest

from jengine.cli import main

from .report_runs import losses, write_run

pytest.importorskip("plotly")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")

# Uses the controls of the page, and writes what it then shows to the document.
DRIVER = """
<script>
(async () => {
  const found = {errors: []};
  addEventListener("error", event => found.errors.push(event.message));
  const until = async test => { while (!test()) await new Promise(done => setTimeout(done, 50)); };
  const node = name => document.querySelector(`.panel[data-name="${name}"]`);
  const lines = name => [...node(name).querySelectorAll(".scatterlayer .js-line")].map(path => path.getAttribute("d"));
  const change = (id, value, event) => { $(id).value = value; $(id).dispatchEvent(new Event(event)); };
  await until(() => panels.size && panels.get("lr").listening);
  found.lines = lines("loss").map(path => path.split(/[MLHVCQ]/).length - 1);
  found.rates = lines("lr").length;
  found.sections = [...$("sections").children].map(link => link.textContent);
  found.text = document.querySelector("main").innerText;
  found.differing = [...$("config").querySelectorAll("tbody tr")].map(row => row.innerText.split("\\t"));
  found.best = [...$("validation").querySelectorAll("td.best")].map(cell => cell.innerText);
  found.phases = $("time").querySelectorAll(".bars .trace.bars").length;
  found.pictures = [...$("pictures").querySelectorAll("img")].map(image => image.naturalWidth);
  found.buttons = [...new Set([...document.querySelectorAll(".modebar-btn")].map(button => button.dataset.title))].sort();
  found.wider = document.documentElement.scrollWidth - innerWidth;
  change("smooth", 0.9, "input");
  found.smoothed = lines("loss").length;
  $("log").click();
  found.scale = [node("loss").querySelector(".plot")._fullLayout.yaxis.type];
  change("axis", "epoch", "change");
  found.epochs = node("loss").querySelector(".plot").data.at(-1).x;
  await Plotly.relayout(node("loss").querySelector(".plot"), {"xaxis.range[0]": 1, "xaxis.range[1]": 2});
  found.zoom = node("lr").querySelector(".plot")._fullLayout.xaxis.range;
  $("run-list").querySelector("input").click();
  found.after_hiding = lines("lr").length;
  change("filter", "^loss$", "input");
  found.filtered = [...document.querySelectorAll(".panel")].map(panel => panel.dataset.name);
  $("theme").click(); $("theme").click();
  found.theme = [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor];
  document.body.replaceChildren(Object.assign(document.createElement("pre"), {id: "found", textContent: JSON.stringify(found)}));
})();
</script>
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Open the report of two runs without a network, use its controls, and return what it showed."""
    root = tmp_path_factory.mktemp("report")
    for name, scale in (("a", 1.0), ("b", 2.0)):
        config = dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1 * scale)))
        write_run(root / "runs" / name, losses(scale), config=config, images=[("sample", 1), ("sample", 2)])
    page = root / "report.html"
    assert main(["report", str(root / "runs"), "--out", str(page)]) == 0
    page.write_text(page.read_text().replace("</body>", f"{DRIVER}</body>"))
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,6000", "--virtual-time-budget=60000",
        f"--user-data-dir={root / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="found">(.*?)</pre>', process.stdout, re.DOTALL)
    assert match, f"the page did not draw its curves: {process.stderr[-2000:]}"
    return json.loads(match[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


def test_the_curves_of_all_runs_are_drawn(found):
    assert found["errors"] == []
    assert len(found["lines"]) == 4  # training and validation of two runs
    assert min(found["lines"]) > 2
    assert found["rates"] == 2


def test_all_sections_have_their_contents(found):
    assert found["sections"] == [
        "Curves", "Best validation", "Pictures", "Time", "Config", "Parameter groups", "Versions",
    ]  # fmt: skip
    assert [row[0] for row in found["differing"]] == ["optim_wrapper.optimizer.lr"]
    assert found["best"] == ["0.05 epoch 4, last 0.05", "0.4 epoch 4, last 0.4"]  # loss and accuracy, of the first run
    assert found["phases"] == 2  # step and compile
    assert found["pictures"] == [6, 6]
    assert "0.10.2" in found["text"]
    assert "30 parameters in 2 tensors" in found["text"]


def test_the_page_is_as_narrow_as_its_window(found):
    assert found["wider"] <= 0


def test_no_button_sends_data_away(found):
    assert all("Cloud" not in title and "Share" not in title for title in found["buttons"])


def test_controls_change_the_curves(found):
    assert found["smoothed"] == 6  # the smoothed and the original curves of training, and the validations
    assert found["scale"] == ["log"]
    assert found["epochs"] == [1, 2, 3, 4]
    assert found["zoom"] == [1, 2]  # that of the other panel
    assert found["after_hiding"] == 1
    assert found["filtered"] == ["loss"]
    assert found["theme"] == ["dark", "rgb(18, 21, 28)"]
