"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "ProgressHook": "jengine.extras.report.progress",
    },
    "jengine.hooks": {
        "ProgressHook": "jengine.extras.report.progress",
    },
    "commands": {
        "ckpt ls": "jengine.extras.report.commands",
        "ckpt rm": "jengine.extras.report.commands",
        "ckpt show": "jengine.extras.report.commands",
        "completion": "jengine.extras.report.commands",
        "diff": "jengine.extras.report.commands",
        "report": "jengine.extras.report.commands",
        "table": "jengine.extras.report.commands",
    },
    "jengine": {
        "report": "jengine.extras.report.report_command",
    },
    "end_report": {
        "list_validations": "jengine.extras.report.validations",
        "report_time": "jengine.extras.report.goodput",
    },
    "test_records": {
        "record_test": "jengine.extras.report.tests",
    },
    "names": {
        "Goodput": "jengine.extras.report.goodput",
        "collect_data": "jengine.extras.report.page",
        "make_server": "jengine.extras.report.server",
        "measure_goodput": "jengine.extras.report.goodput",
        "report": "jengine.extras.report.report_command",
    },
}
