"""The `hf` engine: any causal language model of transformers, captured with forward hooks.

Modules are found by structure and every finding is checked against the model's own output, so a model that does not
fit is refused with a message rather than captured wrongly.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eyas.pipeline.engine import CapturedRow, EngineConfig
from eyas.pipeline.errors import TargetError
from eyas.pipeline.projection import Head

__all__ = ["HfEngine", "final_norm", "find_decoder_layers"]

_log = logging.getLogger(__name__)
_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm", "norm_f", "embedding_norm")
CHECK_TOKENS = 64
"""Tokens of the row whose own logits are compared: enough to see a wrong head, too few to cost anything."""


class HfEngine:
    """A frozen `AutoModelForCausalLM` with hooks on the captured layers."""

    def __init__(self, config: EngineConfig) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(config.threads)
        self.config = config
        self.device = torch.device(config.device)
        loader: Any = AutoModelForCausalLM  # its signature does not know output_loading_info
        try:
            model, loading = loader.from_pretrained(
                config.folder,
                dtype=getattr(torch, config.dtype),
                attn_implementation=config.attention,
                output_loading_info=True,
            )
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise TargetError(
                f"the target in {config.folder} cannot be loaded with attention {config.attention!r}: {error}"
            ) from error
        missing = sorted(loading["missing_keys"])
        if missing:  # transformers fills them with random numbers and says so in its log alone
            raise TargetError(
                f"{config.folder} lacks {len(missing)} tensors of its model ({', '.join(missing[:3])}); config.json "
                "and weights do not belong together, or a weight file is missing"
            )
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.backbone = _backbone(self.model)
        self.layers = find_decoder_layers(self.backbone, int(model.config.get_text_config().num_hidden_layers))
        self.embeddings = self.model.get_input_embeddings()
        self.lm_head = self.model.get_output_embeddings()
        if self.lm_head is None:
            raise TargetError(f"{type(model).__name__} has no output embeddings; eyas captures causal language models")
        self.head = Head(self.lm_head.weight, getattr(self.lm_head, "bias", None), config.logit_transform)
        self._captured: dict[int, Tensor] = {}
        for index in config.aux_layer_outputs:
            self.layers[index].register_forward_hook(self._keep(index))

    def _keep(self, index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[index] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.inference_mode()
    def capture(self, rows: Sequence[np.ndarray]) -> list[CapturedRow]:
        """Run one batch; rows of different length are padded on the right and cut again."""
        lengths = [len(row) for row in rows]
        ids = np.zeros((len(rows), max(lengths)), np.int64)
        for target, row in zip(ids, rows, strict=True):
            target[: len(row)] = row
        self._check_ids(rows)
        mask = None
        if min(lengths) < max(lengths):
            mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
            mask = mask.long().to(self.device)
        last, aux = self._forward(torch.from_numpy(ids).to(self.device), mask)
        return [
            CapturedRow(tuple(state[i, :length] for state in aux), last[i, :length]) for i, length in enumerate(lengths)
        ]

    def _check_ids(self, rows: Sequence[np.ndarray]) -> None:
        limit = self.embeddings.weight.shape[0]
        for number, row in enumerate(rows):
            if int(row.max()) >= limit:
                raise TargetError(
                    f"token {int(row.max())} of batch row {number} is outside the target's {limit} embeddings; "
                    "tokenizer and model do not belong together"
                )

    def _forward(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the final-norm state and the captured layers, [B, T, H] each. No logits are computed."""
        return self.run_backbone(input_ids=ids, attention_mask=mask, use_cache=False)

    def run_backbone(self, **inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the model below its head; return the final-norm state and every captured layer, [B, T, H] each.

        Raises:
            TargetError: a captured layer gave nothing, or another shape than the final norm.
        """
        self._captured.clear()
        output = self.backbone(**inputs)
        last = output[0] if isinstance(output, tuple) else output.last_hidden_state
        aux = [self._captured.get(index) for index in self.config.aux_layer_outputs]
        self._captured.clear()
        for index, state in zip(self.config.aux_layer_outputs, aux, strict=True):
            if state is None or state.shape != last.shape:
                found = "nothing" if state is None else f"shape {tuple(state.shape)}"
                raise TargetError(
                    f"layer {index} of {type(self.model).__name__} gave {found}, the final norm {tuple(last.shape)}; "
                    "this structure is not supported"
                )
        return last, tuple(state for state in aux if state is not None)

    @torch.inference_mode()
    def check(self, row: np.ndarray) -> None:
        """Compare stored-head logits and embeddings with the model's own on the first tokens of a row."""
        ids = torch.from_numpy(row[:CHECK_TOKENS].astype(np.int64))[None].to(self.device)
        self._check_embedding(ids)
        own = self.model(input_ids=ids, use_cache=False).logits[0]
        last, _ = self._forward(ids, None)
        same = self.head.after(nn.functional.linear(last, self.lm_head.weight))[0]
        ours = self.head.logits(last[0])
        if own.dtype == torch.float32 and not torch.equal(same, own):
            self._refuse("the head applied to the last hidden state", same, own)
        # The model rounds its logits once to its own dtype, and once more at every step that follows the head; the
        # second term covers sums whose terms cancel, taken in another order.
        transform = self.config.logit_transform
        roundings = 1 + (transform.scale != 1.0) + 3 * (transform.softcap is not None)
        slack = roundings * _ulp(own) + 1e-5 * own.float().abs().amax(dim=1, keepdim=True)
        if bool(((ours - own.float()).abs() > slack).any()):
            self._refuse("the float32 projection", ours, own)

    def _refuse(self, what: str, ours: Tensor, own: Tensor) -> None:
        worst = float((ours.float() - own.float()).abs().max())
        raise TargetError(
            f"{what} differs from the model's own logits by up to {worst:.3g} with {self.config.logit_transform}; "
            f"{type(self.model).__name__} does something to its logits that eyas does not know, so it is refused"
        )

    def _check_embedding(self, ids: Tensor) -> None:
        """The first layer must read table rows times one factor; anything else a draft could not reproduce."""
        seen: list[Tensor] = []

        def look(_module: nn.Module, args: Any, kwargs: Any) -> None:
            seen.append(args[0] if args else kwargs["hidden_states"])

        hook = self.layers[0].register_forward_pre_hook(look, with_kwargs=True)
        try:
            self.backbone(input_ids=ids, use_cache=False)
        finally:
            hook.remove()
        table = nn.functional.embedding(ids, self.embeddings.weight).float()
        expected = table * self.config.embedding_multiplier
        # bf16 keeps 8 bits, and the factor itself is rounded to the model's dtype before the product.
        if not torch.allclose(seen[0].float(), expected, rtol=2.0**-6, atol=1e-6):
            raise TargetError(
                f"the first layer of {type(self.model).__name__} does not read the embedding table times "
                f"{self.config.embedding_multiplier:g} (learned positions or a norm after the embedding); a draft "
                "could not be given the same input, so it is refused"
            )

    def frozen_tensors(self) -> dict[str, Tensor]:
        """Return embeddings, final norm and, unless tied, the head, as loaded."""
        tensors = {
            "embed_tokens.weight": self.embeddings.weight,
            "norm.weight": final_norm(self.backbone).weight,
        }
        if self.lm_head.weight.data_ptr() != self.embeddings.weight.data_ptr():
            tensors["lm_head.weight"] = self.lm_head.weight
        if self.head.bias is not None:
            tensors["lm_head.bias"] = self.head.bias
        return tensors


def _backbone(model: Any) -> nn.Module:
    backbone = model.base_model
    if backbone is model:
        raise TargetError(f"{type(model).__name__} has no backbone below its head (base_model_prefix)")
    return backbone


def find_decoder_layers(backbone: nn.Module, num_layers: int) -> nn.ModuleList:
    """Return the module list of the decoder's layers: the shallowest list as long as the config says.

    Raises:
        TargetError: none, or more than one at the same depth.
    """
    found = [(name.count("."), m) for name, m in backbone.named_modules() if isinstance(m, nn.ModuleList) and name]
    fitting = [(depth, m) for depth, m in found if len(m) == num_layers]
    shallow = [m for depth, m in fitting if depth == min(d for d, _ in fitting)]
    if len(shallow) != 1:
        sizes = sorted(len(m) for _, m in found)
        raise TargetError(
            f"found {len(shallow)} module lists of {num_layers} decoder layers in {type(backbone).__name__} "
            f"(lists of {sizes}); this structure is not supported"
        )
    return shallow[0]


def final_norm(backbone: nn.Module) -> Any:
    """Return the norm after the last layer.

    Raises:
        TargetError: no child of the backbone has a known name.
    """
    for name in _NORM_NAMES:
        module = getattr(backbone, name, None)
        if isinstance(module, nn.Module) and hasattr(module, "weight"):
            return module
    children = [name for name, _ in backbone.named_children()]
    raise TargetError(f"found no final norm in {type(backbone).__name__}; its parts are {', '.join(children)}")


def _ulp(values: Tensor) -> Tensor:
    """Return one unit in the last place of each value, as float32, in the values' own dtype."""
    info = torch.finfo(values.dtype)
    magnitude = values.float().abs().clamp_min(float(info.tiny))
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps
