"""Of tests whose arguments are crossed `make test` takes as many cases as have each value once; `make thorough` all.

    a in (1, 2, 3), b in (x, y):    1 x,  2 y,  3 x    of six

The first case that adds the most values comes first. What no crossing adds to goes on being tested in full: tests with
one argument, and those not named here, whose cases are cheap or chosen by hand.
"""

from collections.abc import Mapping, Sequence

CROSSED = (
    "tests/gossip/compute/test_combine.py::test_rates_that_are_refused_diverge_and_those_below_do_not",
    "tests/gossip/test_islands.py::test_islands_equal_the_simulation_under_every_kind_of_message",
    "tests/gossip/test_islands.py::test_islands_equal_the_simulation_with_one_worker_each",
    "tests/gossip/test_islands_training.py::test_evaluation_consensus_and_bytes_are_those_of_islands",
    "tests/gossip/test_islands_training.py::test_training_equals_one_worker_per_island_in_plain_torch",
    "tests/gossip/test_lightning.py::test_unequal_numbers_of_batches_do_not_hang",
    "tests/gossip/wire/test_coded_clique.py::test_devices_equal_the_simulation",
    "tests/gossip/wire/test_exchange.py::test_cliques_equal_peers_and_simulation",
    "tests/gossip/wire/test_exchange.py::test_wire_equals_simulation",
    "tests/gossip/wire/test_exchange.py::test_wire_equals_simulation_for_every_rule",
    "tests/gossip/wire/test_exchange_codecs.py::test_compressed_mixing_ends_at_the_exact_mean",
    "tests/gossip/wire/test_exchange_codecs.py::test_compressed_training_converges_to_the_uncompressed_solution",
    "tests/gossip/wire/test_exchange_codecs.py::test_the_mean_is_kept_by_every_codec",
    "tests/gossip/wire/test_exchange_codecs.py::test_wire_equals_simulation",
    "tests/gossip/wire/test_on_devices.py::test_devices_equal_the_simulation",
    "tests/gossip/wire/test_on_devices.py::test_devices_that_encode_equal_the_simulation",
    "tests/gossip/wire/test_on_devices.py::test_models_on_devices_train_as_on_hosts",
    "tests/pipeline/compute/causal/test_flex.py::test_loss_and_gradients_are_those_of_the_whole_model",
    "tests/pipeline/compute/test_stage.py::test_loss_and_gradients_are_those_of_the_whole_model",
    "tests/pipeline/compute/test_stage.py::test_slices_schedules_and_recomputation",
    "tests/pipeline/test_on_devices.py::test_gradients_are_those_of_the_whole_model",
    "tests/shared/test_groups_in_order.py::test_all_workers_make_the_same_groups_in_one_order",
    "tests/shared/test_lost_workers.py::test_whoever_loses_a_worker_says_whom_where_and_why",
    "tests/shared/test_replica_health.py::test_a_small_difference_is_said",
)

Case = tuple[str, Mapping[str, object]]
"""(name of a case, its values by argument)."""


def beyond(cases: Sequence[Case]) -> set[str]:
    """Of one test's cases those without which each value still has one."""
    values = {name: {(argument, str(value)) for argument, value in given.items()} for name, given in cases}
    left, wanted = list(values), set().union(*values.values())
    while wanted:
        most = max(left, key=lambda name: len(values[name] & wanted))
        left.remove(most)
        wanted -= values[most]
    return set(left)
