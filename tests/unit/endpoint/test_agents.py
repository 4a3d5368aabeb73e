"""Agents over HTTP: which tokens they get, what is trained on, and what a broken one costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.agent_world import FIRST, Sayer, agent_run, heard, said
from support.rl_run import TableRun
from support.table_engine import STOP, first_table, single_rank

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.metrics.metric_set import Mean
from mindspeed_rl.rewards import RewardError
from mindspeed_rl.rollout.requests import GenerationRequest

TWO_TURNS = """
def solve(task):
    messages = [user("12")]
    ask(task, messages)
    messages.append({"role": "tool", "content": "34"})
    ask(task, messages)
    return 0.5 + number(task)
"""
OPENING, BETWEEN = heard('"12#'), heard("%34#")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with single_rank():
        yield


def spoken(run: TableRun, samples: Any) -> list[tuple[tuple[int, ...], list[bool]]]:
    """Tokens and loss mask of every sample."""
    responses = run.said(samples)
    return [(tuple(r["token_ids"].tolist()), r["loss_mask"].tolist()) for r in responses]


def rewards(run: TableRun) -> dict[int, float | None]:
    """What the agents returned, of the samples that were scored."""
    return {r.sample_id: r.metadata["environment_reward"] for r in run.pool.requests}


def requests(run: TableRun) -> dict[int, list[GenerationRequest]]:
    """What the engine was asked for, by sample."""
    found: dict[int, list[GenerationRequest]] = {}
    for asked, _ in run.engine.asked:
        for request in asked:
            found.setdefault(request.sample_id, []).append(request)
    return found


def mask(*parts: tuple[int, bool]) -> list[bool]:
    return [trained for count, trained in parts for _ in range(count)]


def test_the_sampled_tokens_are_trained_on_and_nothing_else(tmp_path: Path) -> None:
    """One of them has the text of another token: tokenised again it would be that one."""
    with agent_run(tmp_path, TWO_TURNS) as run:
        rollouts = run.generate()
        assert rollouts.metrics["environment/turns"] == Mean(12.0, 6.0)
        for name in ("error_rate", "branches", "dropped_tokens"):
            assert rollouts.metrics[f"environment/{name}"] == Mean(0.0, 6.0)
        for i, (tokens, trained) in enumerate(spoken(run, rollouts.samples)):
            assert tokens == (*OPENING, *said(i), *BETWEEN, *said(i))
            assert trained == mask((4, False), (3, True), (4, False), (3, True))
        for i, (first, second) in requests(run).items():
            assert first.token_ids == (FIRST, *OPENING)
            assert second.token_ids == (FIRST, *OPENING, *said(i), *BETWEEN)
            assert first.seed != second.seed
        assert all(s.stopped for s in rollouts.samples)
        assert rewards(run) == {i: 0.5 + s.prompt_index for i, s in enumerate(rollouts.samples)}
        (update,) = run.build(rollouts.samples).updates
        assert update.denominators.tokens == 6 * 6
        micro = update.micro_batches
        trained_on = torch.cat([m.targets[m.loss_mask] for m in micro])
        assert sorted(trained_on.tolist()) == sorted(t for i in range(6) for t in said(i) * 2)
        logprobs = torch.cat([m.column("rollout_logprobs") for m in micro])
        torch.testing.assert_close(logprobs, first_table()[trained_on], rtol=0, atol=0)


def test_a_run_goes_on_with_new_conversations_in_every_step(tmp_path: Path) -> None:
    with agent_run(tmp_path, TWO_TURNS) as run:
        for step in (1, 2):
            rollouts = run.generate(step)
            assert rollouts.metrics["environment/turns"] == Mean(12.0, 6.0)
        assert len(requests(run)[0]) == 4


def test_an_agent_may_be_async_and_say_what_it_likes(tmp_path: Path) -> None:
    """Messages of the system, parts of text, None in place of a reward."""
    body = """
    async def solve(task):
        parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
        messages = [{"role": "system", "content": "9"}, {"role": "user", "content": parts}]
        answer = ask(task, messages, temperature=0.3, user="me", stream=False, n=1)
        assert answer["finish_reason"] == "stop"
        messages[-1] |= {"refusal": None, "tool_calls": []}
        ask(task, [*messages, user("3"), {"role": "system", "content": "4"}])
    """
    with agent_run(tmp_path, body) as run:
        rollouts = run.generate()
        for i, (tokens, _) in enumerate(spoken(run, rollouts.samples)):
            assert tokens == (*heard('!9"12#'), *said(i), *heard('"3!4#'), *said(i))
        assert set(rewards(run).values()) == {None}


def test_changed_history_is_a_branch_of_what_stayed(tmp_path: Path) -> None:
    """The second turn is asked for again behind other words; the first keeps its tokens."""
    body = """
    def solve(task):
        first = [user("12")]
        ask(task, first)
        ask(task, [*first, user("33")])
        ask(task, [*first, user("444")])
        return 1.0
    """
    with agent_run(tmp_path, body) as run:
        rollouts = run.generate()
        for i, (tokens, trained) in enumerate(spoken(run, rollouts.samples)):
            assert tokens == (*OPENING, *said(i), *heard('"444#'), *said(i))
            assert trained == mask((4, False), (3, True), (5, False), (3, True))
            contexts = [r.token_ids for r in requests(run)[i]]
            start = (FIRST, *OPENING, *said(i))
            assert contexts[1:] == [(*start, *heard('"33#')), (*start, *heard('"444#'))]
        assert rollouts.metrics["environment/turns"] == Mean(18.0, 6.0)
        assert rollouts.metrics["environment/branches"] == Mean(6.0, 6.0)
        assert rollouts.metrics["environment/dropped_tokens"] == Mean(18.0, 6.0)


def test_an_edited_turn_of_the_model_is_not_its_own_any_more(tmp_path: Path) -> None:
    """It is read as the template renders it, and not trained on."""
    body = """
    def solve(task):
        messages = [user("12")]
        ask(task, messages)
        messages[-1] = {"role": "assistant", "content": "5"}
        ask(task, [*messages, user("6")])
        return 1.0
    """
    with agent_run(tmp_path, body) as run:
        rollouts = run.generate()
        for i, (tokens, trained) in enumerate(spoken(run, rollouts.samples)):
            opening = (*heard('"12#5'), STOP, *heard('"6#'))
            assert tokens == (*opening, *said(i))
            assert trained == mask((len(opening), False), (3, True))
        assert rollouts.metrics["environment/branches"] == Mean(6.0, 6.0)
        assert rollouts.metrics["environment/dropped_tokens"] == Mean(18.0, 6.0)


def test_two_conversations_in_turns_keep_their_tokens(tmp_path: Path) -> None:
    """The agent goes back to what it had left, and ends there."""
    body = """
    def solve(task):
        one, two = [user("1")], [user("2")]
        for text in "34":
            ask(task, two)
            two.append(user(text))
            ask(task, one)
            one.append(user(text))
        return 1.0
    """
    with agent_run(tmp_path, body) as run:
        rollouts = run.generate()
        for i, (tokens, trained) in enumerate(spoken(run, rollouts.samples)):
            assert tokens == (*heard('"1#'), *said(i), *heard('"3#'), *said(i))
            assert trained == mask((3, False), (3, True), (3, False), (3, True))
            two, one, again, last = (r.token_ids for r in requests(run)[i])
            assert again == (*two, *said(i), *heard('"3#'))
            assert last == (*one, *said(i), *heard('"3#'))
        assert rollouts.metrics["environment/branches"] == Mean(18.0, 6.0)


def test_a_turn_that_was_cut_gets_its_stop_token_from_the_template(tmp_path: Path) -> None:
    body = """
    def solve(task):
        messages = [user("12")]
        assert ask(task, messages, max_tokens=1)["finish_reason"] == "length"
        messages.append(user("3"))
        assert ask(task, messages, max_completion_tokens=3)["finish_reason"] == "stop"
        return 1.0
    """
    with agent_run(tmp_path, body) as run:
        rollouts = run.generate()
        for i, (tokens, trained) in enumerate(spoken(run, rollouts.samples)):
            assert tokens == (*OPENING, 4 + i, STOP, *heard('"3#'), *said(i))
            assert trained == mask((4, False), (1, True), (4, False), (3, True))
        assert all(s.stopped for s in rollouts.samples)


@pytest.mark.parametrize(
    ("flags", "limit", "turns", "code"),
    [
        ("--rl-agent-max-turns 2", 50, 2, "max_turns"),
        ("", 13, 2, "context_length_exceeded"),  # the second turn is cut
        ("", 11, 1, "context_length_exceeded"),  # no room behind the message
    ],
)
@pytest.mark.parametrize("returns", ["return 0.25", "raise"])
def test_a_conversation_ends_at_its_limits(
    tmp_path: Path, flags: str, limit: int, turns: int, code: str, returns: str
) -> None:
    """The sample is cut; its reward is what the agent makes of it, if anything."""
    body = f"""
    def solve(task):
        messages = [user("12")]
        try:
            while True:
                ask(task, messages)
                messages.append({{"role": "tool", "content": "34"}})
        except urllib.error.HTTPError as error:
            assert error.code == 400 and json.load(error)["error"]["code"] == {code!r}
            {returns}
    """
    with agent_run(tmp_path, body, flags, limit) as run:
        rollouts = run.generate()
        assert not any(s.stopped for s in rollouts.samples)
        for i, (tokens, _) in enumerate(spoken(run, rollouts.samples)):
            whole = (*OPENING, *said(i), *BETWEEN, *said(i))
            assert tokens == (whole[:limit] if turns == 2 else whole[:7])
        assert rollouts.metrics["environment/turns"] == Mean(6.0 * turns, 6.0)
        assert rollouts.metrics["environment/error_rate"] == Mean(0.0, 6.0)
        assert set(rewards(run).values()) == ({0.25} if "return" in returns else {None})


# --- what goes wrong -----------------------------------------------------------------------------

DEATHS = {
    "killed": "os.kill(os.getpid(), 9)",
    "exit": "sys.exit(3)",
    "raises": "raise OSError('the tool is gone')",
    "endless": "while True: pass",
    "nonsense": "return 'good'",
    "infinite": "return float('inf')",
    "closed": """
        request = b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n"
        request += b"Content-Length: 99\\r\\n\\r\\n{"
        with socket.create_connection(address(task)) as connection:
            connection.sendall(request)
        raise ConnectionError("hung up")
        """,
    "malformed": """
        url = task.base_url + "/chat/completions"
        headers = {"Authorization": "Bearer " + task.api_key}
        urllib.request.urlopen(urllib.request.Request(url, b"{{{", headers))
        """,
    "left": """
        # The engine is generating for a client that has gone: the sample waits for the turn.
        body = json.dumps({"model": task.model, "messages": messages}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}"
        head += f"\\r\\nAuthorization: Bearer {task.api_key}\\r\\n\\r\\n"
        connection = socket.create_connection(address(task))
        connection.sendall(head.encode() + body)
        time.sleep(0.1)
        connection.close()
        raise ConnectionError("no patience")
        """,
    "amid a stream": """
        # The engine goes on to sample for a client that has gone.
        answer = streamed(task, messages)
        assert answer.readline().startswith(b"data: ")
        answer.close()
        raise ConnectionError("no patience")
        """,
    "killed amid a stream": """
        answer = streamed(task, messages)
        assert answer.readline().startswith(b"data: ")
        os.kill(os.getpid(), 9)
        """,
}


LATE = ("killed", "raises", "left", "amid a stream")


def dying(how: str, when: str) -> str:
    lines = DEATHS[how].strip().splitlines()
    indent = min((len(t) - len(t.lstrip()) for t in lines[1:] if t.strip()), default=0)
    death = "\n".join([lines[0], *(" " * 8 + t[indent:] for t in lines[1:])])
    return f"""
def address(task):
    host, port = task.base_url.split("/")[2].split(":")
    return host, int(port)

def streamed(task, messages):
    body = json.dumps({{"model": task.model, "messages": messages, "stream": True}}).encode()
    headers = {{"Authorization": "Bearer " + task.api_key}}
    url = task.base_url + "/chat/completions"
    return urllib.request.urlopen(urllib.request.Request(url, body, headers))

def solve(task):
    messages = [user("12")]
    if {when!r} == "late":
        ask(task, messages)
        messages.append(user("3"))
    # the second of the six that start
    with open({"__COUNT__"!r}, "a") as file:
        file.write("x")
        mine = file.tell()
    if mine == 2:
        {death}
    time.sleep(0.2)
    ask(task, messages)
    return 1.0
"""


@pytest.mark.parametrize(
    ("how", "when"),
    [*((how, "early") for how in DEATHS), *((how, "late") for how in LATE)],
)
def test_a_client_that_dies_costs_its_own_sample(tmp_path: Path, how: str, when: str) -> None:
    """No reward, not even 0, nothing of it trained, counted; the others' samples are whole."""
    body = dying(how, when).replace("__COUNT__", str(tmp_path / "count"))
    flags = "--rl-agent-time-limit-s 3 --reward-max-error-rate 0.2 --rl-agent-workers 6"
    # an agent to a process: one that is killed takes the others of its process along
    with agent_run(tmp_path, body, f"{flags} --rl-agent-threads 1") as run:
        rollouts = run.generate()
        lost = [s for s in rollouts.samples if math.isnan(s.reward)]
        assert len(lost) == 1 and lost[0].num_sampled == 0
        assert rollouts.metrics["environment/error_rate"] == Mean(1.0, 6.0)
        for i, (s, (tokens, _)) in enumerate(
            zip(rollouts.samples, spoken(run, rollouts.samples), strict=True)
        ):
            if s is not lost[0]:
                again = (*said(i), *heard('"3#')) if when == "late" else ()
                assert tokens == (*OPENING, *again, *said(i))
        assert sorted(rewards(run).values(), key=str) == [1.0] * 5
        (update,) = run.build(rollouts.samples).updates
        assert update.denominators.tokens == 5 * (6 if when == "late" else 3)
        # the next step has all six again, in processes that replaced those that were lost
        assert run.generate(2).metrics["environment/error_rate"] == Mean(0.0, 6.0)


def test_a_killed_process_costs_the_conversations_in_it(tmp_path: Path) -> None:
    body = """
    def solve(task):
        ask(task, [user("12")])
        if threading.active_count() > 1:
            time.sleep(0.5)
            os.kill(os.getpid(), 9)
    """
    with (
        agent_run(tmp_path, body) as run,
        pytest.raises(RewardError, match=r"(?s)agent.py:solve: 6 of 6 .*exit code -9"),
    ):
        run.generate()


def test_more_agents_than_threads_wait_for_their_turn(tmp_path: Path) -> None:
    with agent_run(tmp_path, TWO_TURNS, "--rl-agent-threads 2") as run:
        assert run.generate().metrics["environment/error_rate"] == Mean(0.0, 6.0)


def test_an_answer_that_did_not_arrive_is_given_to_the_client_that_asks_again(
    tmp_path: Path,
) -> None:
    """A client that gave up and retries gets the turn that was sampled for it."""

    class Slow(Sayer):
        pause_s = 0.2

    body = dying("left", "early").replace('raise ConnectionError("no patience")', "time.sleep(1.5)")
    body = body.replace("__COUNT__", str(tmp_path / "count")).replace("if mine == 2:", "if True:")
    with agent_run(tmp_path, body, engine=Slow) as run:
        rollouts = run.generate()
        assert rollouts.metrics["environment/turns"] == Mean(6.0, 6.0)
        assert rollouts.metrics["environment/branches"] == Mean(0.0, 6.0)
        assert set(rewards(run).values()) == {1.0}


def test_an_agent_that_returns_before_its_answer_ends_with_what_it_read(tmp_path: Path) -> None:
    """Its reward says nothing of a turn that it has not seen."""
    body = """
    def solve(task):
        messages = [user("12")]
        ask(task, messages)
        def late():
            ask(task, [*messages, user("3")])
        threading.Thread(target=late, daemon=True).start()
        time.sleep(0.05)
        return 1.0
    """

    class Slow(Sayer):
        pause_s = 0.1

    with agent_run(tmp_path, body, engine=Slow) as run:
        rollouts = run.generate()
        for i, (tokens, trained) in enumerate(spoken(run, rollouts.samples)):
            assert tokens == (*OPENING, *said(i)) and trained == mask((4, False), (3, True))
        assert set(rewards(run).values()) == {1.0}


def test_requests_of_one_conversation_wait_for_each_other(tmp_path: Path) -> None:
    body = """
    def solve(task):
        messages = [user("12")]
        ask(task, messages)
        def side():
            ask(task, [*messages, user("3")])
        threads = [threading.Thread(target=side) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 1.0
    """
    with agent_run(tmp_path, body) as run:
        rollouts = run.generate()
        assert rollouts.metrics["environment/turns"] == Mean(24.0, 6.0)
        assert rollouts.metrics["environment/branches"] == Mean(12.0, 6.0)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import nothing_like_it", r"--rl-agent .*agent.py:solve: .*No module"),
        ("os._exit(4)", r"--rl-agent .*agent.py:solve: .*exit code 4"),
    ],
)
def test_agents_that_cannot_run_are_told_at_start(tmp_path: Path, body: str, told: str) -> None:
    with (
        pytest.raises(UsageError, match=told),
        agent_run(tmp_path, f"{body}\ndef solve(task): ..."),
    ):
        pass
