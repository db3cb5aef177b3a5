"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "commands": {
        "report": "jengine.extras.report.commands",
        "table": "jengine.extras.report.commands",
    },
    "jengine": {
        "report": "jengine.extras.report.report_command",
    },
    "notebook_progress": {
        "NotebookProgress": "jengine.extras.report.notebook",
    },
    "names": {
        "collect_data": "jengine.extras.report.page",
        "make_server": "jengine.extras.report.server",
        "report": "jengine.extras.report.report_command",
    },
}
