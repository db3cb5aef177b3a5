"""Fakes of tracker clients, which record calls and refuse arguments that the real ones do not have."""

import inspect
import types

# The parameters of what the backends call; a test marked `foreign` compares them with those of the packages.
SIGNATURES = {
    "aim": {
        "Run": "run_hash=None, *, repo=None, read_only=False, experiment=None, force_resume=False, "
        "system_tracking_interval=10, log_system_params=False, capture_terminal_logs=True",
        "Run.track": "value, name=None, step=None, epoch=None, *, context=None",
        "Run.add_tag": "value",
        "Run.close": "",
        "Image": "image, caption='', format=None, quality=90, optimize=False",
        "Distribution": "samples=None, bin_count=64, *, hist=None, bin_range=None",
    },
    "clearml": {
        "Task.init": "project_name=None, task_name=None, task_type=..., tags=None, reuse_last_task_id=True, "
        "continue_last_task=False, output_uri=None, auto_connect_arg_parser=True, auto_connect_frameworks=True, "
        "auto_resource_monitoring=True, auto_connect_streams=True, deferred_init=False",
        "Task.set_offline": "offline_mode=False",
        "Task.set_configuration_object": "name, config_text=None, description=None, config_type=None, config_dict=None",
        "Task.get_logger": "",
        "Task.close": "",
        "Logger.report_scalar": "title, series, value, iteration",
        "Logger.report_image": "title, series, iteration=None, local_path=None, image=None, matrix=None, "
        "max_image_history=None, delete_after_upload=False, url=None",
        "Logger.report_histogram": "title, series, values, iteration=None, labels=None, xlabels=None, xaxis=None, "
        "yaxis=None, mode=None, data_args=None, extra_layout=None",
    },
    "comet_ml": {
        "start": "api_key=None, workspace=None, project=None, project_name=None, experiment_key=None, mode=None, "
        "online=None, source=None, experiment_config=None",
        "CometExperiment.get_key": "",
        "CometExperiment.end": "",
        "CometExperiment.log_metrics": "dic, prefix=None, step=None, epoch=None, include_context=True",
        "CometExperiment.log_image": "image_data, name=None, overwrite=False, image_format='png', image_scale=1.0, "
        "image_shape=None, image_colormap=None, image_minmax=None, image_channels='last', copy_to_tmp=True, step=None, "
        "annotations=None, metadata=None",
        "CometExperiment.log_asset_data": "data, name=None, overwrite=False, step=None, metadata=None, file_name=None, "
        "epoch=None",
    },
    "trackio": {
        "init": "project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, "
        "config=None, resume='never', settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0, "
        "auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None",
        "Run.log": "metrics, step=None",
        "Run.finish": "",
        "Image": "value, caption=None",
        "Histogram": "sequence=None, np_histogram=None, num_bins=64",
        "Markdown": "text=''",
    },
}


def read_signature(package, name):
    return inspect.signature(eval(f"lambda {SIGNATURES[package][name]}: None"))


class Fakes:
    """Makers of fake functions, which record `(name, arguments by name)` in `calls`."""

    def __init__(self, package):
        self.package, self.calls = package, []

    def make(self, name, result=None):
        """Return a fake of `name` that returns `result`, or what it returns for the arguments."""
        signature = read_signature(self.package, name)

        def call(*args, **kwargs):
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            self.calls.append((name, arguments))
            return result(**arguments) if callable(result) else result

        return call

    def make_object(self, owner, base=object, **attributes):
        """Return an object of a new class with the fake methods of `owner`."""
        methods = {
            name.split(".")[1]: self.make(name) for name in SIGNATURES[self.package] if name.startswith(f"{owner}.")
        }
        made = type(owner, (base,), {})()
        vars(made).update({**methods, **attributes})
        return made

    def named(self, name):
        """Return the arguments of the calls of `name`."""
        return [arguments for called, arguments in self.calls if called == name]


class _Entries(dict):
    """Aim's runs are also dicts of texts."""


def fake_aim():
    fakes = Fakes("aim")
    runs = []

    def open_run(**arguments):
        hash_ = arguments.get("run_hash") or f"hash{len(runs)}"
        runs.append(fakes.make_object("Run", _Entries, hash=hash_, name=None))
        return runs[-1]

    module = types.SimpleNamespace(
        Run=fakes.make("Run", open_run), Image=fakes.make("Image", lambda **found: ("image", found)),
        Distribution=fakes.make("Distribution", lambda **found: ("distribution", found)),
    )  # fmt: skip
    return module, fakes, runs


def fake_clearml():
    fakes = Fakes("clearml")
    logger = fakes.make_object("Logger")

    def init(reuse_last_task_id, **arguments):
        return fakes.make_object("Task", id=reuse_last_task_id or "task0", get_logger=lambda: logger)

    task = types.SimpleNamespace(init=fakes.make("Task.init", init), set_offline=fakes.make("Task.set_offline"))
    return types.SimpleNamespace(Task=task), fakes


def fake_comet():
    fakes = Fakes("comet_ml")

    def start(experiment_key="key0", **arguments):
        return fakes.make_object("CometExperiment", get_key=lambda: experiment_key)

    module = types.SimpleNamespace(start=fakes.make("start", start), ExperimentConfig=lambda **settings: settings)
    return module, fakes


def fake_trackio():
    fakes = Fakes("trackio")

    def init(name="brave-sunset-0", **arguments):
        return fakes.make_object("Run", name=name)

    values = {name: fakes.make(name, lambda **found: found) for name in ("Image", "Histogram", "Markdown")}
    return types.SimpleNamespace(init=fakes.make("init", init), **values), fakes
