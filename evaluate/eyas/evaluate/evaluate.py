"""`eyas evaluate`: decode prompts with the real target and an exported draft, and measure how the draft does.

open the target's folder -> check the draft against it -> render prompts -> load both
for each prompt: decode plainly, decode with the drafted chain, compare
acceptance length, acceptance by position, speed, equality -> text and JSON
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from eyas.cache_format.errors import ConfigError
from eyas.cache_format.layout import replace_file
from eyas.cache_format.report import Report
from eyas.evaluate.config import EvaluateConfig
from eyas.evaluate.decoder import Stop, decode_chain, decode_plain
from eyas.evaluate.draft_folder import DraftFolder, open_draft
from eyas.evaluate.drafter import Eagle3Drafter
from eyas.evaluate.equality import Divergence, Verdict, find_divergences
from eyas.evaluate.prompts import Prompt, PromptSet, read_prompts
from eyas.evaluate.results import Evaluation, PromptResult, Setting
from eyas.evaluate.target import DecodingTarget, load_target
from eyas.pipeline.chat import ChatEncoder
from eyas.pipeline.config import parse_switches
from eyas.pipeline.target_folder import TargetFolder, open_target

__all__ = ["evaluate"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_WARM_UP_TOKENS = 4


def evaluate(config: EvaluateConfig) -> Report:
    """Run `eyas evaluate`.

    Raises:
        TargetError: the target cannot be opened or loaded.
        DraftError: the draft is no exported draft, or belongs to another target.
        ConfigError: answers as long as asked for leave no room for a prompt.
        DataError, PromptError: the prompt files cannot be read, or hold nothing to decode.
    """
    folder = open_target(config.target, config.revision)
    draft_folder = open_draft(config.draft, folder)
    tokenizer = folder.tokenizer()
    prompts = read_prompts(
        config.prompts,
        ChatEncoder(tokenizer, eos_ids=folder.eos_ids, switches=parse_switches(config.template_switches)),
        longest=_longest_prompt(folder, config),
        split=config.split,
        limit=config.limit,
    )
    target = _load_target(config, folder, draft_folder)
    draft = draft_folder.load(target.embeddings.weight, dtype=getattr(torch, target.config.dtype), device=target.device)
    target.check(np.asarray(prompts.prompts[0].input_ids, np.uint32))
    stop = Stop(frozenset(folder.eos_ids), config.max_new_tokens)
    session = _Session(config, target, Eagle3Drafter(draft), stop, tokenizer)
    evaluation = _decode_all(session, _setting(folder, draft_folder, target), prompts)
    if config.out is not None:
        replace_file(config.out, json.dumps(evaluation.as_dict(), indent=1).encode() + b"\n")
    return Report(evaluation.text(), evaluation.exit_code)


def _longest_prompt(folder: TargetFolder, config: EvaluateConfig) -> int:
    """Return how many tokens a prompt may have so that the answer and the last drafted chain fit behind it."""
    positions = int(getattr(folder.config, "max_position_embeddings", sys.maxsize))
    longest = positions - config.max_new_tokens - config.depth
    if longest < 1:
        raise ConfigError(
            f"--max-new-tokens {config.max_new_tokens} and --depth {config.depth} leave no room for a prompt in the "
            f"{positions} positions of {folder.path}; choose smaller ones"
        )
    return longest


class _Session:
    """Target and drafter with the settings that every prompt shares."""

    def __init__(
        self, config: EvaluateConfig, target: DecodingTarget, drafter: Eagle3Drafter, stop: Stop, tokenizer: Any
    ) -> None:
        self.config, self.target, self.drafter, self.stop, self.tokenizer = config, target, drafter, stop, tokenizer
        self.vocabulary = frozenset(drafter.vocab_ids.tolist())

    def warm_up(self, prompt: Prompt) -> None:
        """Run both ways once, so that no prompt pays for what is set up on first use."""
        ids, stop = self._ids(prompt), Stop(frozenset(), _WARM_UP_TOKENS)
        decode_plain(self.target, ids, stop)
        decode_chain(self.target, self.drafter, ids, stop, depth=self.config.depth)

    def decode(self, prompt: Prompt) -> tuple[PromptResult, list[Divergence]]:
        """Decode one prompt plainly and with the draft, one right after the other, and compare."""
        ids, plain, plain_seconds = self._ids(prompt), None, None
        if self.config.compare_plain:
            plain, plain_seconds = _timed(lambda: decode_plain(self.target, ids, self.stop))
        depth = self.config.depth
        output, seconds = _timed(lambda: decode_chain(self.target, self.drafter, ids, self.stop, depth=depth))
        found: list[Divergence] = []
        if plain is not None:
            found = find_divergences(self.target, prompt.prompt_id, ids, plain, output.tokens, self.stop)
        result = PromptResult(
            prompt=prompt,
            tokens=output.tokens,
            text=self.tokenizer.decode(output.tokens),
            accepted=output.accepted,
            discarded=output.discarded,
            inside_vocabulary=sum(token in self.vocabulary for token in output.tokens[1:]),
            seconds=seconds,
            plain_seconds=plain_seconds,
        )
        return result, found

    def _ids(self, prompt: Prompt) -> torch.Tensor:
        return torch.tensor(prompt.input_ids, device=self.target.device)


def _decode_all(session: _Session, setting: Setting, prompts: PromptSet) -> Evaluation:
    session.warm_up(prompts.prompts[0])
    results, divergences = [], []
    for number, prompt in enumerate(prompts.prompts, 1):
        result, found = session.decode(prompt)
        results.append(result)
        divergences += found
        _log.info(
            "prompt %d of %d: %d tokens, %d passes, %.1f s",
            number,
            len(prompts.prompts),
            len(result.tokens),
            len(result.accepted),
            result.seconds + (result.plain_seconds or 0.0),
        )
    verdict = None
    if session.config.compare_plain:
        tokens = sum(len(result.tokens) for result in results)
        verdict = Verdict.of(tokens, divergences, demanded=setting.dtype == "float32")
    return Evaluation(config=session.config, setting=setting, prompts=prompts, results=tuple(results), verdict=verdict)


def _load_target(config: EvaluateConfig, folder: TargetFolder, draft: DraftFolder) -> DecodingTarget:
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_target(
        folder,
        aux_layer_outputs=draft.aux_layer_outputs,
        dtype=folder.dtype(config.dtype),
        device=device,
        attention=config.attention,
        threads=config.threads or torch.get_num_threads(),
    )


def _setting(folder: TargetFolder, draft: DraftFolder, target: DecodingTarget) -> Setting:
    return Setting(
        target=str(folder.path),
        draft=str(draft.path),
        family="EAGLE-3.1" if draft.config.fc_norm or draft.config.norm_output else "EAGLE-3",
        dtype=target.config.dtype,
        device=target.config.device,
        attention=target.config.attention,
        threads=target.config.threads,
        aux_layer_outputs=draft.aux_layer_outputs,
        draft_vocab_size=draft.config.draft_vocab_size,
        vocab_size=draft.config.vocab_size,
    )


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """Run and time; every pass hands its tokens to the host, so nothing is still running on a device."""
    start = time.perf_counter()
    return work(), time.perf_counter() - start
