"""Refuse mutants of the configs: a few dozen of those that `python -m benchmarks.mutants` counts, all without a compile."""

# Each is wrong in any config; a hook of `default_hooks` may have a name of its own.
KINDS = ("misspelled key", "added key", "unknown type", "wrong section")
COUNT = 40


def test_mutants_of_the_configs_are_refused_without_a_file_and_with_a_place_and_an_expectation():
    from benchmarks import mutants  # imports most of the package

    chosen = []
    for seed in range(10 * COUNT):
        mutant = mutants.mutate(seed)
        is_own_name = mutant.kind == "misspelled key" and mutant.path.startswith("default_hooks.")
        if mutant.kind in KINDS and not is_own_name and not mutants.is_legal(mutant):
            chosen.append(mutant)
        if len(chosen) == COUNT:
            break
    outcomes = [(mutant[:4], mutants.run(mutant.base, mutant.cfg)) for mutant in chosen]
    assert [(mutant, outcome) for mutant, outcome in outcomes if outcome.name != "constructor" or outcome.is_raw] == []
    assert len({mutant[0] for mutant, _ in outcomes}) > 10, "of many configs and calls"
