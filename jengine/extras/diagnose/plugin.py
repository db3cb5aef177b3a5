"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {
        "CheckInvalidLossHook": "jengine.extras.diagnose.invalid_loss",
        "ClassNumCheckHook": "jengine.extras.diagnose.class_count",
        "EmptyCacheHook": "jengine.extras.diagnose.memory",
        "HistogramHook": "jengine.extras.diagnose.inspect_hook",
        "InspectHook": "jengine.extras.diagnose.inspect_hook",
        "MemoryProfilerHook": "jengine.extras.diagnose.memory",
        "NumClassCheckHook": "jengine.extras.diagnose.class_count",
        "NumericsGuardHook": "jengine.extras.diagnose.numerics_guard",
        "ProfilerHook": "jengine.extras.diagnose.profiler",
    },
    "jengine.hooks": {
        "CheckInvalidLossHook": "jengine.extras.diagnose.invalid_loss",
    },
    "commands": {
        "schedule": "jengine.extras.diagnose.commands",
        "lr-find": "jengine.extras.diagnose.commands",
        "coord-check": "jengine.extras.diagnose.commands",
        "model": "jengine.extras.diagnose.commands",
        "groups": "jengine.extras.diagnose.commands",
        "inspect": "jengine.extras.diagnose.commands",
        "data": "jengine.extras.diagnose.commands",
        "replay": "jengine.extras.diagnose.commands",
        "profile": "jengine.extras.diagnose.commands",
        "stacks": "jengine.extras.diagnose.commands",
    },
    "argument_hints": {
        "explain_arguments": "jengine.extras.diagnose.arguments",
    },
    "shortcuts": {
        "expand_shortcuts": "jengine.extras.diagnose.arguments",
    },
    "config_checks": {
        "check_packages": "jengine.extras.diagnose.missing_packages",
    },
    "end_report": {
        "name_slowest": "jengine.extras.diagnose.stalls",
    },
    "explainers": {
        "add_place": "jengine.extras.diagnose.locate",
        "describe_failing_layer": "jengine.extras.diagnose.failing_layer",
        "explain_assigned_attributes": "jengine.extras.diagnose.frozen_attributes",
        "explain_full_disk": "jengine.extras.diagnose.full_disk",
        "explain_label_axes": "jengine.extras.diagnose.label_axes",
        "explain_masks": "jengine.extras.diagnose.masks",
        "explain_out_of_memory": "jengine.extras.diagnose.out_of_memory",
        "explain_static_modes": "jengine.extras.diagnose.static_modes",
        "list_changed_arguments": "jengine.extras.diagnose.changed_arguments",
        "find_first_bad_value": "jengine.extras.diagnose.first_bad_value",
        "list_host_entries": "jengine.extras.diagnose.host_entries",
        "name_deeper_setting": "jengine.extras.diagnose.deeper_settings",
        "name_failing_samples": "jengine.extras.diagnose.failing_examples",
        "name_model_settings": "jengine.extras.diagnose.model_settings",
        "name_unregistered": "jengine.extras.diagnose.unregistered",
        "name_unequal_samples": "jengine.extras.diagnose.unequal_samples",
        "name_versions": "jengine.extras.diagnose.written_versions",
        "name_wrong_labels": "jengine.extras.diagnose.wrong_labels",
        "suggest_metrics": "jengine.extras.diagnose.metric_names",
    },
    "first_batch_checks": {
        "check_readers": "jengine.extras.diagnose.process_batches",
    },
    "hook_checks": {
        "check_expected_names": "jengine.extras.diagnose.expected_names",
        "check_saved_states": "jengine.extras.diagnose.expected_names",
        "check_stage_arguments": "jengine.extras.diagnose.expected_names",
    },
    "label_checks": {
        "check_labels": "jengine.extras.diagnose.labels",
    },
    "step_checks": {
        "StepChecks": "jengine.extras.diagnose.check",
    },
    "start_checks": {
        "name_long_intervals": "jengine.extras.diagnose.no_effect",
        "name_small_batches": "jengine.extras.diagnose.no_effect",
        "name_without_effect": "jengine.extras.diagnose.no_effect",
        "name_early_ends": "jengine.extras.diagnose.no_effect",
        "name_late_ends": "jengine.extras.diagnose.no_effect",
        "name_slow_averages": "jengine.extras.diagnose.no_effect",
    },
    "result_checks": {
        "check_labels_of_nan": "jengine.extras.diagnose.labels",
    },
    "run_watches": {
        "FrozenAttributes": "jengine.extras.diagnose.frozen_attributes",
        "ProfileRequests": "jengine.extras.diagnose.profile_requests",
        "ProgressWatch": "jengine.extras.diagnose.progress_watch",
        "SlowestProcess": "jengine.extras.diagnose.slowest_process",
        "RepeatedCompiles": "jengine.extras.diagnose.repeated_compiles",
    },
    "names": {
        "Findings": "jengine.extras.diagnose.replay",
        "replay_step": "jengine.extras.diagnose.replay",
    },
}
