"""What `make quick` runs beside the laws: a world, a trainer and a process test of each method; of cases the first.

A world is ranks as threads, a trainer has forked workers, a process test is a command line.
"""

QUICK = {
    "gossip": (
        "tests/gossip/wire/test_exchange.py::test_wire_equals_simulation_for_every_rule",
        "tests/gossip/test_strategy.py::test_trainer_equals_simulation_for_every_rule",
        "tests/processes/test_training.py::test_lightning_starts_the_processes",
    ),
    "pipeline": (
        "tests/pipeline/wire/test_executor.py::test_messages_of_both_directions_arrive",
        "tests/pipeline/test_strategy.py::test_training_is_that_of_one_process",
        "tests/processes/test_recipes.py::test_the_recipe_trains_in_a_pipeline",
    ),
    "partial": (
        "tests/partial/wire/test_reducer.py::test_means_and_bytes",
        "tests/partial/test_strategy.py::test_full_depth_is_ddp",
        "tests/processes/test_recipes.py::test_a_recipe_trains_under_other_strategies[partial_backprop",
    ),
    "spilled": (
        "tests/spilled/test_strategy.py::test_training_is_that_without_spilling",
        "tests/processes/test_recipes.py::test_a_recipe_trains_under_other_strategies[spilled",
    ),
    "sweep": (
        "tests/sweep/test_time_slicing.py::test_every_batch_of_every_loop_has_the_device_and_nothing_else_does",
        "tests/sweep/test_launcher.py::test_failures_end_nothing_else_and_resume_goes_on_with_them",
    ),
}


def chosen(names: list[str]) -> set[str]:
    """Of these tests."""
    wanted = [start for starts in QUICK.values() for start in starts]
    found = [next((name for name in names if name.startswith(start)), None) for start in wanted]
    return {name for name in found if name is not None}
