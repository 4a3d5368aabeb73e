"""Named faults of the ranks in Ray: their places, the driver's messages, who is blamed."""

from __future__ import annotations

from support.mutation import Mutation

_CONTROL = "tests/unit/test_ray_control.py::"
_HOSTS = "tests/unit/test_environment_hosts.py::"

RAY_MUTATIONS = (
    Mutation(
        "driver-lets-ranks-disagree",
        "orchestration/ray_controller.py",
        "if reply.stage != replies[0].stage:",
        "if reply.stage is None:",
        _CONTROL + "test_ranks_that_disagree_end_the_run",
    ),
    Mutation(
        "driver-waits-for-the-ranks-of-a-failed-run",
        "orchestration/ray_controller.py",
        "timeout=POLL_S)\n            self._raise_told()\n",
        "timeout=POLL_S)\n",
        _CONTROL + "test_a_failure_is_told_with_its_traceback_while_others_hang",
    ),
    Mutation(
        "driver-kills-ranks-before-their-stacks",
        "orchestration/ray_controller.py",
        "self._ray.wait(self._calls, num_returns=len(self._calls), timeout=limit_s)",
        "self._ray.wait(self._calls, num_returns=1, timeout=limit_s)",
        _CONTROL + "test_a_hang_leaves_the_ranks_the_time_to_dump_their_stacks",
    ),
    Mutation(
        "driver-forgets-the-traceback",
        "orchestration/ray_controller.py",
        'f"{told.trace}{self._prog}: {told}"',
        'f"{self._prog}: {told}"',
        _CONTROL + "test_a_failure_is_told_with_its_traceback_while_others_hang",
    ),
    Mutation(
        "data-in-a-control-message",
        "orchestration/ray_controller.py",
        "assert size <= allowed,",
        "assert size,",
        _CONTROL + "test_a_message_with_data_in_it_is_refused",
    ),
    Mutation(
        "sample-ids-one-by-one",
        "orchestration/stages.py",
        "if ranges and ranges[-1][1] == i:",
        "if ranges and ranges[-1][1] > i:",
        _CONTROL + "test_messages_have_the_same_size_for_any_number_of_samples",
    ),
    Mutation(
        "rank-does-any-stage",
        "orchestration/ray_worker.py",
        "if stage != self._next:",
        "if stage is None:",
        _CONTROL + "test_a_rank_refuses_another_stage_than_its_own",
    ),
    Mutation(
        "ranks-in-ray-leave-one-by-one",
        "orchestration/ray_worker.py",
        "                end_job(self._job)\n",
        "                pass\n",
        _CONTROL + "test_a_rank_does_what_it_is_told_and_says_what_is_next",
    ),
    Mutation(
        "rank-in-ray-sees-its-own-device-only",
        "orchestration/ray_cluster.py",
        "d for place in here for d in place.devices",
        "d for d in found[rank].devices",
        _CONTROL + "test_a_rank_gets_what_torchrun_would_set",
    ),
    Mutation(
        "devices-in-the-order-of-their-text",
        "orchestration/ray_cluster.py",
        "place.devices), key=_device_order)",
        "place.devices))",
        _CONTROL + "test_a_rank_gets_what_torchrun_would_set",
    ),
    Mutation(
        "devices-of-the-driver-for-every-node",
        "orchestration/ray_cluster.py",
        "        and name not in _VISIBLE\n",
        "",
        _CONTROL + "test_settings_of_libraries_go_along_and_visible_devices_do_not",
    ),
    Mutation(
        "local-ray-without-room-for-rewards",
        "orchestration/ray_controller.py",
        "per_engine += config.rewards.reward_num_workers",
        "per_engine += 0",
        _CONTROL + "test_a_local_ray_has_a_place_for_every_actor",
    ),
    Mutation(
        "conversation-wanders-between-actors",
        "environments/hosts.py",
        "for number, what in asked.items():\n"
        "            shares[number % len(shares)][number] = what",
        "for i, (number, what) in enumerate(asked.items()):\n"
        "            shares[i % len(shares)][number] = what",
        _HOSTS + "test_a_conversation_stays_with_its_actor",
    ),
    Mutation(
        "lost-environment-actor-is-not-replaced",
        "environments/hosts.py",
        "                self._actors[position] = self._start()\n",
        "",
        _HOSTS + "test_a_lost_actor_costs_its_conversations_and_is_replaced",
    ),
)
