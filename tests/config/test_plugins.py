"""Extras of installed packages: found by their entry point, used by name, and refused where two have one name."""

import textwrap

import pytest

PLUGIN = """
provides = {
    "HOOKS": {"CountHook": "my_package.count", "OtherHook": "my_package.other"},
    "names": {"halve": "my_package.count"},
    "jengine": {"halve": "my_package.count"},
    "commands": {"count": "my_package.command"},
}
"""
COUNT = """
from jengine.config import HOOKS
from jengine.hooks import Hook

@HOOKS.register_module()
class CountHook(Hook):
    pass

def halve(x):
    return x / 2
"""
COMMAND = """
def add_commands(commands):
    count = commands.add("count", "my_package.command:run", "count to a number", commands.traceback)
    count.add_argument("number", type=int)
    commands["train"].add_argument("--quietly", action="store_true")

def run(args, overrides):
    print(*range(args.number))
    return 3
"""


@pytest.fixture
def run(run_python, tmp_path):
    """Install a package with an extra, and run code that finds it."""

    def install_and_run(code, extra="my_extra", plugin=PLUGIN, count=COUNT):
        (tmp_path / "my_package").mkdir()
        for name, text in {"__init__": "", "plugin": plugin, "count": count, "command": COMMAND, "other": "raise ImportError('other')"}.items():
            (tmp_path / "my_package" / f"{name}.py").write_text(text)
        info = tmp_path / "my_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[jengine.extras]\n{extra} = my_package.plugin\n")
        return run_python(f"sys.path.insert(0, {str(tmp_path)!r})\n{textwrap.dedent(code)}")

    return install_and_run


def test_an_error_in_the_plugin_of_a_package_names_the_extra(run):
    done = run("from jengine.config import HOOKS\nHOOKS.get('SwAVHook')", plugin="import no_such_module")
    assert "No module named 'no_such_module'" in done.stderr
    assert "in the extra 'my_extra' of an installed package, 'my_package.plugin'" in done.stderr


def test_a_hook_of_an_installed_package_is_found_by_name_and_imports_its_module_alone(run):
    done = run("""
        import sys
        import jengine
        from jengine.config import HOOKS
        print(HOOKS.get("CountHook").__module__, "OtherHook" in HOOKS, "my_package.other" in sys.modules, jengine.halve(4))
    """)
    assert done.stdout.split() == ["my_package.count", "True", "False", "2.0"], done.stderr


def test_a_command_of_an_installed_package_runs_and_extends_others(run):
    done = run("""
        from jengine.cli import main
        from jengine.cli.parser import build_parser
        print(build_parser().parse_args(["train", "config.py", "--quietly"]).quietly)
        print(main(["count", "3"]))
    """)
    assert done.stdout.split("\n")[:3] == ["True", "0 1 2", "3"], done.stderr


def test_an_extra_with_the_name_of_another_is_an_error_that_names_both(run):
    done = run("from jengine.config.plugins import list_extras\nlist_extras()", extra="selfsup")
    assert "must have different names, got 'selfsup' twice, also from the package 'my_package'" in done.stderr


def test_an_entry_with_the_name_of_another_extras_entry_is_an_error_that_names_both(run):
    plugin = 'provides = {"HOOKS": {"SwAVHook": "my_package.count"}}'
    done = run("from jengine.config import HOOKS\nHOOKS.get('SwAVHook')", plugin=plugin)
    assert "must have different names in HOOKS, got 'SwAVHook' in 'selfsup' and 'my_extra'" in done.stderr


def test_an_extra_without_one_that_it_requires_is_left_out_and_says_so(run):
    plugin = 'provides = {"HOOKS": {"CountHook": "my_package.count"}, "requires": {"boats": "boats.plugin"}}'
    done = run("from jengine.config import HOOKS\nprint('CountHook' in HOOKS)\nHOOKS.get('CountHook')", plugin=plugin)
    assert done.stdout.strip() == "False"
    assert "got 'CountHook'; it is in the extra 'my_extra', which needs 'boats', not installed" in done.stderr
