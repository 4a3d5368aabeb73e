"""Wrong model files: rows that are lost, kept from other weights, or too many at a time."""

from __future__ import annotations

from collections import Counter

from faults.planting import Fault, gives, returns

_SIMULATED = "tests/simulated/test_model_files.py::"
_EXPORT = "tests/unit/model_files/test_hf_export.py::"

MODEL_FILES = (
    Fault("last-rows-of-a-tensor-not-written", "mindspeed_rl.model_files.slices:row_slices",
          gives(lambda slices: slices[:-1] or slices),
          _SIMULATED + "test_writers_get_every_row_of_their_files",
          "The end of a tensor in an export would be a hole of zeros."),
    Fault("last-holder-on-a-node-gets-no-rows", "mindspeed_rl.model_files.slices:within",
          gives(lambda ranks: ranks[:-1] or ranks),
          _SIMULATED + "test_ranks_of_a_node_share_what_they_read",
          "A replica would start with zeros for weights."),
    Fault("last-rows-of-each-rank-not-read", "mindspeed_rl.model_files.loading:plan_reads",
          gives(lambda queues: {rank: slices[:-1] for rank, slices in queues.items()}),
          _SIMULATED + "test_ranks_of_a_node_share_what_they_read",
          "Parameters would start with zeros where the file has weights."),
    Fault("messages-not-counted-in-the-buffer", "mindspeed_rl.model_files.slices:_loads",
          gives(lambda loads: Counter({key: 0 for key in loads})),
          _SIMULATED + "test_no_rank_has_more_than_a_slice_of_each_kind_in_a_round",
          "An export would take more of a device than the dry run says."),
    Fault("rows-come-from-the-first-holder", "mindspeed_rl.model_files.slices:nearest",
          lambda original: lambda owners, rank, ranks_per_node: owners[0][0],
          _SIMULATED + "test_a_holder_that_is_near_sends",
          "One rank would send to all others, over links between nodes."),
    Fault("file-of-other-weights-taken-for-whole", "mindspeed_rl.model_files.row_files:is_whole",
          returns(True), _EXPORT + "test_files_of_other_weights_are_written_again",
          "An export would mix the weights of two runs."),
    Fault("groups-of-ranks-do-not-exchange", "mindspeed_rl.parallel.two_levels:steps_of",
          gives(lambda steps: (steps[0], type(steps[1])(), steps[2])),
          "tests/unit/parallel/test_two_levels.py::test_every_rank_ends_with_every_row",
          "Plans of other groups would be compared with whatever memory holds."),
)  # fmt: skip
