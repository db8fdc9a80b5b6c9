"""Who talks to llama.cpp's server, and to its converter: both played here by lines of Python.

tests/export/test_llama_cpp.py runs the real ones.
"""

import json
import sys
from pathlib import Path

import pytest

PLAYED = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "-m" not in sys.argv:
    sys.exit("error: no model")
METRICS = '''# TYPE llamacpp:spec_decode_num_drafts counter
llamacpp:prompt_tokens_total 12
llamacpp:spec_decode_num_drafts_total 5
llamacpp:spec_decode_num_draft_tokens_total 10
llamacpp:spec_decode_num_accepted_tokens_total 4
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 3
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} 1
'''

class Played(BaseHTTPRequestHandler):
    waits = 2

    def do_GET(self):
        if self.path == "/health" and Played.waits:
            Played.waits -= 1
            self.say("loading", 503)
        elif self.path == "/metrics":
            self.say(METRICS)
        else:
            self.say(json.dumps({{"build_info": "b1-0c1e5709"}}))

    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = [*job.pop("prompt")[-1:], *range(job["n_predict"] - 1)]
        timings = {{"draft_n_accepted": 2}} if "-md" in sys.argv else {{}}
        self.say(json.dumps({{"tokens": tokens, "timings": timings | {{"job": job}}}}))

    def say(self, text, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Played).serve_forever()
"""

JOB = {"prompts": [[7, 8], [9]], "sampling": {"temperature": 0.0, "max_tokens": 4}}


@pytest.fixture
def built(script, tmp_path) -> Path:
    """What `make llama_cpp` fills, with other programs in it."""
    server = tmp_path / script.SERVER
    server.parent.mkdir(parents=True)
    server.write_text(PLAYED)
    server.chmod(0o755)
    (tmp_path / script.SOURCES / "conversion").mkdir(parents=True)
    return tmp_path


def test_a_server_is_waited_for_asked_and_ended(script, built):
    server = script.LlamaServer(["-m", "base.gguf", "-md", "head.gguf"], built / "log", built)
    first, second = server.ask(JOB), server.ask(JOB)
    assert first["tokens"] == [[8, 0, 1, 2], [9, 0, 1, 2]]
    asked = {"n_predict": 4, "temperature": 0.0, "ignore_eos": False}
    asked |= {"return_tokens": True, "cache_prompt": False}
    assert [one["job"] for one in first["timings"]] == [asked, asked]
    assert first["seconds"] > 0
    # two texts of four tokens: one is of the prompt's forward, two were accepted drafts
    counted = {"drafts": 5, "draft_tokens": 10, "accepted_tokens": 4, "forwards": 2}
    assert first["counters"] == counted | {"accepted_tokens_per_pos": [3, 1]}
    assert second["counters"]["forwards"] == 4
    assert server.versions == {"llama.cpp": "b1-0c1e5709"}
    server.close()
    assert server.process.poll() is not None


def test_without_a_head_nothing_is_counted(script, built):
    server = script.LlamaServer(["-m", "base.gguf"], built / "log", built)
    assert server.ask(JOB)["counters"] == {}
    server.close()


def test_a_server_that_does_not_start_says_why(script, built):
    with pytest.raises(SystemExit, match=r"did not start; .*log ends with error: no model"):
        script.LlamaServer([], built / "log", built)


@pytest.mark.parametrize("pre_tokenizer", ["", "llama-bpe"])
def test_the_converter_is_told_how_an_unknown_tokenizer_splits(script, built, pre_tokenizer):
    sources = built / script.SOURCES
    (sources / "conversion" / "base.py").write_text(
        "class TextModel:\n    def get_vocab_base_pre(self, tokenizer): return 'its own'\n"
    )
    (sources / "convert_hf_to_gguf.py").write_text(
        "import json, sys\nfrom conversion.base import TextModel\n"
        "told = [*sys.argv[1:], TextModel().get_vocab_base_pre(None)]\n"
        "open(sys.argv[2], 'w').write(json.dumps(told))\n"
    )
    out = str(built / "out")
    script.convert(["folder", out], "f16", pre_tokenizer=pre_tokenizer, built=built)
    told = json.loads(Path(out).read_text())
    assert told == ["folder", out, "--outtype", "f16", pre_tokenizer or "its own"]


def test_a_converter_that_fails_says_why(script, built):
    (built / script.SOURCES / "convert_hf_to_gguf.py").write_text("raise KeyError('no such')")
    with pytest.raises(SystemExit, match=r"converter failed: [^$]*no such"):
        script.convert(["folder"], "f16", built=built)
