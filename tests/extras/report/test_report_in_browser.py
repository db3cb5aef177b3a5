"""Use the controls of a report in a browser."""

import pytest

from jengine.cli import main

from .browser import BROWSER, open_page
from .report_runs import losses, write_run

pytest.importorskip("plotly")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")

HELPERS = """
  const until = async test => {
    for (let i = 0; !test(); i++) {
      if (i > 400) throw new Error(`never true: ${test}; ${errors}`);
      await new Promise(done => setTimeout(done, 50));
    }
  };
  const node = name => document.querySelector(`.panel[data-name="${name}"]`);
  const lines = name => [...node(name).querySelectorAll(".scatterlayer .js-line")].map(path => path.getAttribute("d"));
  const change = (id, value, event) => { $(id).value = value; $(id).dispatchEvent(new Event(event)); };
  const cells = row => [...row.children].map(cell => cell.innerText.replace("only", "").trim());
  const rows = () => [...$("table").querySelectorAll("tbody tr")].map(cells);
  const sort = text => [...$("table").querySelectorAll("th button")].find(button => button.innerText === text).click();
  await until(() => document.readyState === "complete" && panels.size && [...panels.values()].some(panel => panel.listening));
"""
# What a page of two runs shows, and after each use of its controls.
TWO_RUNS = """
  const found = {errors};
  await until(() => panels.get("lr").listening);
  found.lines = lines("loss").map(path => path.split(/[MLHVCQ]/).length - 1);
  found.rates = lines("lr").length;
  found.sections = [...$("sections").children].map(link => link.textContent);
  found.text = document.querySelector("main").innerText;
  found.differing = [...$("config").querySelectorAll("tbody tr")].map(row => row.innerText.split("\\t"));
  found.best = [...$("table").querySelectorAll("td.best")].map(cell => cell.innerText);
  found.phases = $("time").querySelectorAll(".bars .trace.bars").length;
  found.pictures = [...$("pictures").querySelectorAll("img")].map(image => image.naturalWidth);
  found.buttons = [...new Set([...document.querySelectorAll(".modebar-btn")].map(button => button.dataset.title))].sort();
  found.wider = document.documentElement.scrollWidth - innerWidth;
  const pictured = [...document.querySelectorAll(".js-plotly-plot")].map(plot => plot.querySelector("svg[role=img]")?.getAttribute("aria-label"));
  found.pictured = [pictured.filter(Boolean).length === pictured.length, pictured.find(text => text?.startsWith("loss"))];
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
  const visible = [...document.querySelectorAll("button, a, input, select, summary")].filter(item => item.checkVisibility() && getComputedStyle(item).opacity !== "0");
  const hit = item => item.type === "checkbox" ? item.closest("label") : item;
  found.small = visible.map(item => [item.outerHTML.slice(0, 80), hit(item).getBoundingClientRect()]).filter(([, box]) => box.width < 24 || box.height < 24);
  found.unnamed = visible.filter(item => !(item.getAttribute("aria-label") || item.textContent.trim() || item.querySelector("img[alt]") || item.closest("label")?.textContent.trim())).map(item => item.outerHTML);
  found.nested = document.querySelectorAll("label button, button button").length;
  found.progress = [...document.querySelectorAll("[role=progressbar]")].map(bar => bar.getAttribute("aria-valuenow"));
  found.hidden_runs = (() => { data.runs.forEach(run => hidden.add(run.name)); renderComparison(); describe(panels.get("loss")); return node("loss").querySelector(".warn").innerText; })();
  const box = $("run-list").querySelector("input");
  box.focus(); box.click();
  found.focus = [document.activeElement.dataset.focus, document.activeElement === box];
  $("theme").click(); $("theme").click();
  found.theme = [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor];
  return found;
"""
# A sweep of 12 runs: three learning rates, two widths, two seeds.
SWEEP = """
  const found = {errors};
  const plot = () => node("loss").querySelector(".plot"), traces = () => plot().data.length;
  found.cards = [...$("run-list").children].slice(0, 2).map(card => [card.querySelector(".run-name").innerText, card.querySelector(".metric").textContent]);
  found.colors = new Set(data.runs.map(color)).size;
  found.headings = [...$("table").querySelectorAll("thead th")].map(cell => cell.innerText);
  found.first = rows()[0];
  sort("lr"); found.rates = rows().map(row => row[2]);
  sort("lr"); found.falling = rows().map(row => row[2]);
  change("search", "lr=0.3 width=64", "input");
  found.found = [rows().length, traces(), $("shown").innerText];
  change("search", "nothing", "input");
  found.nothing = [$("run-list").innerText, $("table").hidden];
  change("search", "", "input");
  found.parallel = document.querySelectorAll("#parallel .scatterlayer .trace").length;
  found.axes = $("parallel-plot").layout.annotations.filter(item => item.yanchor === "bottom").map(item => item.text);
  $("table").querySelector(".only").click();
  found.solo = [visibleRuns().length, document.querySelectorAll("tr.hidden-run").length, traces()];
  $("show-all").click();
  found.shown = visibleRuns().length;
  const loss = plot();
  const {xaxis, yaxis} = loss._fullLayout, box = loss.querySelector(".nsewdrag").getBoundingClientRect();
  const place = {clientX: box.x + xaxis.d2p(30), clientY: box.y + yaxis.d2p(2 * 11 / 30), bubbles: true};
  loss.querySelector(".nsewdrag").dispatchEvent(new MouseEvent("mousemove", place));
  await until(() => loss.querySelector(".hovertext"));
  found.hover = loss.querySelector(".hovertext").textContent;
  found.faded = [...loss.querySelectorAll(".scatterlayer .trace")].filter(trace => Number(trace.style.opacity) < 1).length;
  $("group").click();
  sort("best accuracy/top1 ↑");
  found.groups = rows();
  found.bands = [traces(), plot().data.filter(trace => trace.fill === "tonexty").length];
  const curve = plot().data.find(trace => trace.customdata && trace.mode === "lines");
  found.mean = [curve.y[1], curve.customdata[1]];
  return found;
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Open the report of two runs without a network, use its controls, and return what it showed."""
    root = tmp_path_factory.mktemp("report")
    for name, scale in (("a", 1.0), ("b", 2.0)):
        config = dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1 * scale)))
        write_run(root / "runs" / name, losses(scale), config=config, images=[("sample", 1), ("sample", 2)])
    assert main(["report", str(root / "runs"), "--out", str(root / "report.html")]) == 0
    with open_page(root / "report.html", root / "profile", width=500, height=6000) as page:
        return page.run(HELPERS + TWO_RUNS)


def test_the_curves_of_all_runs_are_drawn(found):
    assert found["errors"] == []
    assert len(found["lines"]) == 4  # training and validation of two runs
    assert min(found["lines"]) > 2
    assert found["rates"] == 2


def test_all_sections_have_their_contents(found):
    assert found["sections"] == ["Runs", "Curves", "Pictures", "Time", "Config", "Parameter groups", "Versions"]
    assert [row[0] for row in found["differing"]] == ["optim_wrapper.optimizer.lr"]
    assert found["best"] == ["0.4 epoch 4", "0.05 epoch 4"]  # accuracy and loss, both of the first run
    assert found["phases"] == 2  # step and compile
    assert found["pictures"] == [6, 6]
    assert "0.10.2" in found["text"]
    assert "30 parameters in 2 tensors" in found["text"]


def test_the_page_is_as_narrow_as_its_window(found):
    assert found["wider"] <= 0


def test_a_finger_can_hit_all_controls_and_a_screen_reader_names_them(found):
    assert found["small"] == []  # of less than 24 pixels
    assert found["unnamed"] == []
    assert found["nested"] == 0
    assert found["progress"] == ["100", "100"]
    assert found["pictured"] == [
        True, "loss, 4 curves. a ends at 0.025; a (validation) ends at 0.05; b ends at 0.05; b (validation) ends at 0.1",
    ]  # fmt: skip


def test_the_focus_stays_where_it_was_when_a_card_is_pressed(found):
    assert found["focus"] == ["card a", False]  # the card is a new element


def test_hidden_runs_leave_a_sentence(found):
    assert found["hidden_runs"] == "All runs are hidden."


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


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Open the report of twelve runs, use its table, and return what it showed."""
    root = tmp_path_factory.mktemp("sweep")
    settings = [(lr, width, seed) for lr in (0.1, 0.3, 1.0) for width in (64, 128) for seed in (0, 1)]
    for i, (lr, width, seed) in enumerate(settings):
        config = dict(optimizer=dict(lr=lr), model=dict(width=width), randomness=dict(seed=seed))
        scale = 1 / lr + seed  # a larger rate is better; of seeds the first
        write_run(root / "runs" / f"run_{i:02}", losses(scale), config=config, seed=seed)
    assert main(["report", str(root / "runs"), "--out", str(root / "report.html")]) == 0
    with open_page(root / "report.html", root / "profile") as page:
        return page.run(HELPERS + SWEEP)


def test_a_sweep_opens_with_its_best_runs(sweep):
    assert sweep["errors"] == []
    assert sweep["cards"] == [["run_08", "best accuracy/top1 0.4"], ["run_10", "best accuracy/top1 0.4"]]  # 0.4 / scale of 1
    assert sweep["colors"] == 12
    assert sweep["headings"] == [
        "run", "status", "lr", "width", "best accuracy/top1 ↑", "last accuracy/top1", "best loss ↓", "last loss", "seed",
        "iterations", "time",
    ]  # fmt: skip
    assert sweep["first"] == [
        "run_08",
        "finished",
        "1",
        "64",
        "0.4 epoch 4",
        "0.4",
        "0.05 epoch 4",
        "0.05",
        "0",
        "40",
        "4 s",
    ]


def test_a_search_without_a_run_says_so(sweep):
    assert sweep["nothing"] == ["No run has all of these words: nothing", True]


def test_the_table_is_sorted_and_searched_and_shows_one_run_alone(sweep):
    assert sweep["rates"] == ["0.1"] * 4 + ["0.3"] * 4 + ["1"] * 4
    assert sweep["falling"] == sweep["rates"][::-1]
    assert sweep["found"] == [2, 4, "2 of 12 runs shown"]  # training and validation of two seeds
    assert sweep["solo"] == [1, 11, 2]
    assert sweep["shown"] == 12


def test_parallel_coordinates_have_a_line_for_each_run(sweep):
    assert sweep["parallel"] == 12
    assert sweep["axes"] == ["lr", "width", "best accuracy/top1"]


def test_the_curve_under_the_pointer_is_described_and_the_others_fade(sweep):
    # run_01 has the same losses, 2 * 11 / 30, and is below
    assert sweep["hover"] == "run_03 (validation)lr=0.1 width=1280.73333 at 30"
    assert sweep["faded"] == 22


def test_seeds_are_averaged_in_table_and_curves(sweep):
    assert len(sweep["groups"]) == 6
    # 0.4 / 1 and 0.4 / 2: mean 0.3, sample deviation 0.2 / sqrt(2)
    assert sweep["groups"][0][2:5] == ["1", "64", "0.3 ± 0.14"]
    assert (sweep["groups"][0][1], sweep["groups"][0][-1]) == ("finished", "2")
    assert sweep["bands"] == [36, 12]  # of training and validation: two edges and a mean for each of six groups
    # the losses of the best group at iteration 2: 1 / 2 and 2 / 2
    assert sweep["mean"] == pytest.approx([0.75, 0.125**0.5])
