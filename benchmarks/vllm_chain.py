"""Runs in a venv with vLLM, not ours: greedy chain speculation over given prompt ids; prints one JSON line.

    python vllm_chain.py SPEC.json

SPEC.json: {"target", "draft", "depth", "max_new_tokens", "prompts": [[id, ...], ...], "eos": [id, ...]}
"""

import json
import os
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    """Decode and report accepted tokens, passes and the tokens themselves."""
    from vllm import LLM, SamplingParams  # only this venv has it

    with open(sys.argv[1]) as file:
        spec = json.load(file)
    engine = LLM(
        model=spec["target"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={"method": "eagle3", "model": spec["draft"], "num_speculative_tokens": spec["depth"]},
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=spec["max_new_tokens"], stop_token_ids=spec["eos"], detokenize=False
    )
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in spec["prompts"]], params)
    counts = {m.name: m for m in engine.get_metrics()}
    passes = counts["vllm:spec_decode_num_drafts"].value
    accepted = counts["vllm:spec_decode_num_accepted_tokens"].value
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps({"passes": passes, "accepted": accepted, "tokens": tokens}))


if __name__ == "__main__":
    main()
