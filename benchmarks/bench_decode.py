"""The exported draft in the reference decoder, and in vLLM when a venv with it is named.

`speedup`  tokens/s with the draft over plain greedy decoding, reported as it is
`vllm`     acceptance length of the reference decoder over vLLM's, same draft, prompts and depth (within 0.03 of 1)
`tokens`   share of answers that are equal token for token in both

--vllm names the Python of a venv with vLLM; it runs there in a process of its own.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from measuring import parse, report

from eyas.evaluate.config import EvaluateConfig
from eyas.evaluate.evaluate import evaluate
from eyas.evaluate.prompts import read_prompts
from eyas.pipeline.chat import ChatEncoder
from eyas.pipeline.target_folder import open_target


def in_vllm(python: str, flags: Any, folder: Path) -> dict[str, Any]:
    """Decode the same prompts in vLLM; return its counts and tokens."""
    target = open_target(flags.target)
    encoder = ChatEncoder(target.tokenizer(), eos_ids=target.eos_ids)
    prompts = read_prompts((flags.prompts,), encoder, longest=512, limit=flags.limit).prompts
    spec = {
        "target": flags.target,
        "draft": flags.draft,
        "depth": flags.depth,
        "max_new_tokens": flags.max_new_tokens,
        "eos": sorted(target.eos_ids),
        "prompts": [list(prompt.input_ids) for prompt in prompts],
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    program = Path(__file__).with_name("vllm_chain.py")
    command = [python, str(program), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"vLLM ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure one draft."""
    flags = parse(
        __doc__ or "", target="", draft="", prompts="examples/chats_heldout.jsonl", depth=3, max_new_tokens=64,
        limit=24, vllm="",
    )  # fmt: skip
    if not flags.target or not flags.draft:
        raise SystemExit("--target and --draft name the folders to decode with, as `make demo` leaves them in runs/")
    limit = 2 if flags.quick else flags.limit
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "evaluation.json"
        config = EvaluateConfig(
            target=flags.target,
            draft=Path(flags.draft),
            prompts=(flags.prompts,),
            depth=flags.depth,
            max_new_tokens=flags.max_new_tokens,
            limit=limit,
            out=out,
        )
        print(evaluate(config).text)
        ours = json.loads(out.read_text())
        ratios = {"speedup": ours["speedup"]}
        measured = {k: ours[k] for k in ("acceptance_length", "acceptance_rate_per_position", "tokens_per_second")}
        print(f"limit    plain greedy      {ours['plain_tokens_per_second']:8.1f} tokens/s")
        print(f"measured with the draft    {ours['tokens_per_second']:8.1f} tokens/s  ratio {ratios['speedup']:.2f}")
        if flags.vllm and not flags.quick:
            theirs = in_vllm(flags.vllm, flags, Path(name))
            length = 1 + theirs["accepted"] / theirs["passes"]
            same = [a["tokens"] == b for a, b in zip(ours["prompts"], theirs["tokens"], strict=True)]
            ratios |= {"vllm": ours["acceptance_length"] / length, "tokens": sum(same) / len(same)}
            measured["vllm_acceptance_length"] = round(length, 4)
            print(f"acceptance length {ours['acceptance_length']:.3f}, vLLM {length:.3f}  ratio {ratios['vllm']:.3f}")
            print(f"answers equal token for token: {sum(same)} of {len(same)}")
    report("decode", ratios, measured, quick=flags.quick, save=flags.save)


if __name__ == "__main__":
    main()
