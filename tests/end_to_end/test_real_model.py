"""The demo on its real target, cut to a dozen chats: every verb as a user types it, from chats to accepted tokens."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = """
[demo]
chats = "examples/chats.jsonl"
heldout = "examples/chats_heldout.jsonl"
supervision = ["hidden", "topk", "probs"]

[precompute]
limit = 12
draft_vocab_size = 2048
supervision = ["hidden", "topk", "probs"]
max_length = 192
shard_tokens = 1024
heldout_fraction = 0.2

[train-from-cache]
ttt_steps = 3
tokens_per_micro_batch = 512

[evaluate]
depth = 3
max_new_tokens = 12
limit = 2
"""


@pytest.mark.ray
@pytest.mark.slow
def test_the_demo_decodes_a_real_model_exactly_from_every_encoding(tmp_path):
    config = tmp_path / "small.toml"
    config.write_text(SETTINGS)
    command = [sys.executable, "examples/demo.py", "--config", str(config), "--runs", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.fullmatch(r"acceptance length: \d\.\d\d \(chain, greedy, depth 3\)", done.stdout.strip().splitlines()[-1])
    for supervision in ("hidden", "topk", "probs"):
        result = json.loads((tmp_path / "runs" / "small" / f"draft-{supervision}" / "evaluation.json").read_text())
        assert result["equal_to_plain"]["holds"]
        assert result["equal_to_plain"]["tokens_compared"] > 0
        assert 1.0 <= result["acceptance_length"] <= 4.0
