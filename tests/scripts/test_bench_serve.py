"""bench_serve.py without vLLM: tests/export/test_vllm.py and test_llama_cpp.py run the engines."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
BASE = ROOT / "recipes" / "tiny_code" / "base"
SLEEP = "import time; time.sleep(600)"


def test_plain_prompts_are_said_by_a_user_and_mt_bench_is_eight_categories(script, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    base, options = SimpleNamespace(tokenizer=tokenizer), SimpleNamespace(limit=5, batch=[1])
    rows = [
        {"question": "how many?", "category": "math"},
        {"turns": ["say it", "and again"], "category": "writing"},
        {"turns": ["translate"], "category": "translation"},
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt_set = script.first_turns(base, "mt_bench", str(file), options)
    assert [prompt.text for prompt in prompt_set.prompts] == [
        "<user>how many?<assistant>",
        "<user>say it<assistant>",
    ]
    assert len(script.first_turns(base, "other", str(file), options).prompts) == 3
    assert tokenizer.chat_template


def test_an_engine_runs_while_it_is_awake_and_ends_when_it_is_stopped(script):
    server = object.__new__(script.Server)
    server.process = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    engine = psutil.Process(server.process.pid)
    try:
        with server.awake():
            assert engine.status() != psutil.STATUS_STOPPED
        # a stop takes effect a little later
        os.waitpid(engine.pid, os.WUNTRACED)
        assert engine.status() == psutil.STATUS_STOPPED
        with server.awake():
            os.waitpid(engine.pid, os.WCONTINUED)
            assert engine.status() != psutil.STATUS_STOPPED
    finally:
        script._end(server.process)
    assert server.process.returncode == -signal.SIGTERM


def test_counters_are_those_of_the_turn_and_drafts_beyond_the_end_do_not_count(script):
    before = {"drafts": 10, "accepted_tokens_per_pos": [5, 2]}
    after = {"drafts": 12, "accepted_tokens_per_pos": [7, 3]}
    answer = {"tokens": [[1, 2, 3, 4]], "latencies": [1.0], "counters": after}
    turn = script.turn_of(answer, before)
    assert (turn.forwards, turn.accepted) == (2, [2, 1])
    # three tokens after the first one; vLLM accepted a fourth, which was cut off
    assert script._total_counts([turn])["tokens_per_forward"] == 1.5


def test_speed_is_paired_by_request_and_for_as_many_tokens(script):
    alone = [script.Turn([[0] * 10], [1.0]), script.Turn([[0] * 30, [0] * 9], [9.0, 2.0])]
    # half as long a text in a quarter of the time is twice as fast
    drafted = [script.Turn([[0] * 5], [0.25]), script.Turn([[0] * 30, [0] * 9], [4.5, 1.0])]
    gain = script.speedup(alone, drafted)
    assert gain == {"ratio": 2, "interval": (2, 2)}


def test_a_request_that_ends_is_replaced_at_once(script):
    server, running, max_running = object.__new__(script.Server), set[int](), list[int]()

    def complete(prompt: list[int], limit: int, ignore_eos: bool) -> list[int]:
        del limit, ignore_eos
        running.add(prompt[0])
        max_running.append(len(running))
        # the first text takes longer than all others together
        time.sleep(0.5 if prompt[0] == 0 else 0.05)
        running.remove(prompt[0])
        return prompt

    server.complete, server.counters = complete, dict
    answer = server.ask([[number] for number in range(8)], 1, in_flight=2)
    assert max(max_running) == 2
    assert answer["tokens"] == [[number] for number in range(8)]
    # seconds of a request do not include those that it waited for a place
    assert answer["latencies"][0] > 2 * max(answer["latencies"][1:])


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [(16, [40] * 4), (8, [20] * 4), (1, [2] * 20), (32, [40] * 4), (0, [13, 13, 14])],
)
def test_turns_are_equal_at_least_four_and_use_all_prompts(script, batch, sizes):
    requests = []

    def ask(prompts: Any, limit: int, **options: Any) -> dict[str, Any]:
        if limit != script.WARM_UP:
            requests.append((len(prompts), options["in_flight"], len(options["arrivals"])))
        texts = [[0] for _ in prompts]
        return {"tokens": texts, "latencies": [1.0] * len(prompts), "counters": {}}

    engine = SimpleNamespace(ask=ask, awake=nullcontext)
    options = SimpleNamespace(periods=3, load=[1.0, 2.0], new_tokens=64)
    prompts = [[number] for number in range(40)]
    arms = script._measure({script.ALONE: engine}, prompts, batch, "set", options)
    assert requests == [(size, batch, 0 if batch else size) for size in sizes]
    assert sum(len(turn.tokens) for turn in arms[script.ALONE]) == sum(sizes)


def test_counters_of_vllm_are_read_by_the_same_names(script):
    lines = (
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="base"} 5.0\n'
        'vllm:spec_decode_num_drafts_created{engine="0",model_name="base"} 1.79e+09\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 3.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 1.0\n'
    )
    server = SimpleNamespace(request=lambda _: SimpleNamespace(text=lines))
    counted = {"drafts": 5, "accepted_tokens_per_pos": [3, 1]}
    assert script.Server.counters(server) == counted


def test_load_rises_and_falls_at_random(script):
    arrivals = torch.tensor(script.arrival_times([1.0, 10.0], 600, 0))
    gaps = arrivals.diff(prepend=torch.zeros(1))
    assert (gaps > 0).all()
    ends, middle = torch.cat([gaps[:100], gaps[500:]]).mean(), gaps[200:400].mean()
    # rates of 2.5 and 8.5 on average
    assert 2.5 < ends / middle < 5
    assert script.arrival_times([1.0, 10.0], 600, 1) != arrivals.tolist()


def test_budget_row_counts_forwards_without_drafts(script):
    alone = [script.Turn([[0] * 10], [1.0])]
    # nine tokens after the first one, of which three were drafts
    drafted = [script.Turn([[0] * 10], [0.5], 2, [2, 1])]
    arms = {script.ALONE: alone, script.BUDGET: drafted}
    (row,) = script.compare_rows(None, "gsm8k", 1, [[1]], arms)
    assert (row["depth"], row["speedup"]["ratio"]) == ("budget", 2.0)
    assert row["served"]["forwards"] == 6
    assert "replay" not in row


def test_running_servers_are_asked_by_their_model_name(script):
    options = SimpleNamespace(url=["http://127.0.0.1:9"], depths=[3])
    with pytest.raises(SystemExit, match="one for each of --depths, got 1 for 1"):
        script._start_engines(None, None, {}, options)
    with pytest.raises(SystemExit, match="no vLLM server answers at http"):
        script.RunningServer("http://127.0.0.1:9")
