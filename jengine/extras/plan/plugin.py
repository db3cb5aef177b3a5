"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "commands": {
        "plan": "jengine.extras.plan.commands",
    },
    "end_report": {
        "report_flops": "jengine.extras.plan.peak_flops",
    },
    "names": {
        "Collective": "jengine.extras.plan.collectives",
        "Operation": "jengine.extras.plan.hlo",
        "Program": "jengine.extras.plan.hlo",
        "count_flops": "jengine.extras.plan.flops",
        "measure_program": "jengine.extras.plan.program_costs",
        "find_collectives": "jengine.extras.plan.collectives",
        "traffic": "jengine.extras.plan.collectives",
    },
    "device_orders": {"arrange_slices": "jengine.extras.plan.slices"},
}
