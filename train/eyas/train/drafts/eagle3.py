"""The EAGLE-3 draft: network, training steps and decoding steps on one set of weights.

EAGLE-3 (arXiv 2503.01840); EAGLE-3.1 by `fc_norm` and `norm_output`. One layer reads
[RMSNorm(embedding); RMSNorm(g)] and adds to the un-normalised g. Parameter names are the bare serving keys
(`fc.weight`, `midlayer.self_attn.q_proj.weight`, `norm.weight`, `lm_head.weight`, `d2t` ...), so the state dict is the
export (reference: NeMo AutoModel `draft_llama.py`, vLLM `models/llama_eagle3.py`).

Training, N packed slots, M of them still active:
    g = draft.project_hidden_states(aux)                                 [N, A*Ht] -> [N, H]
    g, state = draft.first_step(g, input_ids, position_ids, layout, rows)   -> [M, H]
    state = state.select(kept_rows); g = g[kept_rows]                    (optional)
    g = draft.next_step(g, input_ids_of_rows, state)                     [M, H] -> [M, H]
    logits = draft.compute_logits(g)                                     [M, W]

Decoding, batch 1:
    cache = draft.new_cache(capacity)
    g = draft.extend(draft.project_hidden_states(aux), token_ids, positions, cache)    target features: [n, H]
    g = draft.extend(g[-1:], drafted_id, next_position, cache)                         the draft's own state
    cache.rollback(length)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eyas.cache_format.errors import ConfigError
from eyas.train.batch import PackedLayout
from eyas.train.drafts.attention import AttentionKind, cached_attention, ttt_attention
from eyas.train.drafts.cache import DraftCache
from eyas.train.drafts.config import Eagle3Config
from eyas.train.drafts.layers import Eagle3Layer, RMSNorm, RotaryEmbedding
from eyas.train.errors import TrainError


class DraftWeightsError(TrainError):
    """The tensors given to a draft do not fit its config."""


@dataclass(kw_only=True, slots=True)
class TttState:
    """Keys and values of one unroll: the step-0 block of all slots, the diagonals of the M active rows."""

    layout: PackedLayout
    rows: Int[Tensor, "M"] | None
    """Slots of the active rows, ascending; None: all N."""
    position_ids: Int[Tensor, "M"]
    """Step-0 rotary positions of the active rows."""
    step0_keys: Float[Tensor, "N g d"]
    step0_values: Float[Tensor, "N g d"]
    diagonal_keys: list[Float[Tensor, "M g d"]] = field(default_factory=list)
    diagonal_values: list[Float[Tensor, "M g d"]] = field(default_factory=list)

    def select(self, kept: Int[Tensor, "M2"]) -> TttState:
        """The state of fewer rows; `kept` are ascending indices into the present rows."""
        return TttState(
            layout=self.layout,
            rows=kept if self.rows is None else self.rows[kept],
            position_ids=self.position_ids[kept],
            step0_keys=self.step0_keys,
            step0_values=self.step0_values,
            diagonal_keys=[keys.index_select(0, kept) for keys in self.diagonal_keys],
            diagonal_values=[values.index_select(0, kept) for values in self.diagonal_values],
        )


class Eagle3Draft(nn.Module):
    """EAGLE-3 and EAGLE-3.1 draft of a Llama-style target."""

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        config: Eagle3Config,
        *,
        draft_vocab_ids: Int[Tensor, "W"] | None = None,
        attention: AttentionKind = "auto",
    ) -> None:
        """Build with uninitialised weights; call `initialize`, or load a state dict.

        `draft_vocab_ids` are the target ids of the draft vocabulary, needed exactly when W < V (ConfigError).
        """
        super().__init__()
        self.config = config
        self.attention: AttentionKind = attention
        width, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        if config.fc_norm:
            norms = (RMSNorm(config.target_hidden_size, eps) for _ in range(config.num_aux_hidden_states))
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(config.fc_width, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = RotaryEmbedding(config)
        self._set_vocabulary(draft_vocab_ids)

    def _set_vocabulary(self, ids: Tensor | None) -> None:
        config = self.config
        if not config.maps_vocabulary:
            if ids is not None and not torch.equal(ids.cpu().long(), torch.arange(config.vocab_size)):
                raise ConfigError("the draft vocabulary is the target's: draft_vocab_ids can only be 0 .. V-1 or None")
            return
        if ids is None or ids.shape != (config.draft_vocab_size,):
            found = None if ids is None else tuple(ids.shape)
            raise ConfigError(f"draft_vocab_ids must have shape ({config.draft_vocab_size},), got {found}")
        ids = ids.to(torch.int64)
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or ids.unique().numel() != ids.numel():
            raise ConfigError(f"draft_vocab_ids must be distinct ids in [0, {config.vocab_size})")
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[ids.cpu()] = True
        self.register_buffer("d2t", ids - torch.arange(ids.shape[0], device=ids.device))
        self.register_buffer("t2d", t2d)

    @property
    def draft_vocab_ids(self) -> Int[Tensor, "W"]:
        """Target id of every draft id."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return ids + self.d2t if self.config.maps_vocabulary else ids

    @classmethod
    def from_tensors(
        cls, config: Eagle3Config, tensors: Mapping[str, Tensor], *, attention: AttentionKind = "auto"
    ) -> Eagle3Draft:
        """A draft from its state dict; `embed_tokens.weight` may be absent (load the target's afterwards).

        DraftWeightsError names every missing, unexpected or wrongly shaped tensor.
        """
        ids = None
        if config.maps_vocabulary:
            if "d2t" not in tensors:
                raise DraftWeightsError("the draft vocabulary is smaller than the target's, but there is no tensor d2t")
            ids = tensors["d2t"].long() + torch.arange(tensors["d2t"].shape[0])
        draft = cls(config, draft_vocab_ids=ids, attention=attention)
        expected = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        missing = sorted(expected.keys() - found.keys() - {"embed_tokens.weight", "t2d"})
        unexpected = sorted(found.keys() - expected.keys())
        misshapen = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
        if missing or unexpected or misshapen:
            raise DraftWeightsError(
                f"the tensors do not fit the draft's config: missing {missing}, unexpected {unexpected}, "
                f"wrong shape {[(name, found[name], expected[name]) for name in misshapen]}"
            )
        draft.load_state_dict(dict(tensors), strict=False)
        return draft

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Normal(0, initializer_range) matrices, zero biases, norms of one; a function of `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                values = torch.empty(parameter.shape).normal_(0.0, self.config.initializer_range, generator=generator)
                parameter.copy_(values)
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)

    @torch.no_grad()
    def load_target_embeddings(self, weight: Float[Tensor, "V Ht"]) -> None:
        """Copy the target's input embeddings; DraftWeightsError when the widths differ (H != Ht)."""
        if weight.shape != self.embed_tokens.weight.shape:
            raise DraftWeightsError(
                f"the target's embeddings have shape {tuple(weight.shape)}, the draft needs "
                f"{tuple(self.embed_tokens.weight.shape)}: a draft of another width cannot share them"
            )
        self.embed_tokens.weight.copy_(weight)

    @torch.no_grad()
    def load_target_head(self, weight: Float[Tensor, "V Ht"]) -> None:
        """Start the draft's head from the target's rows of the draft vocabulary (a warm start; needs H == Ht)."""
        rows = weight[self.draft_vocab_ids.to(weight.device)]
        if rows.shape != self.lm_head.weight.shape:
            raise DraftWeightsError(
                f"the target's head has rows of width {rows.shape[1]}, the draft's of {self.lm_head.weight.shape[1]}"
            )
        self.lm_head.weight.copy_(rows)

    def freeze_embeddings(self) -> None:
        """Keep the target's embeddings: the only choice that every engine serves."""
        self.embed_tokens.weight.requires_grad_(False)

    def project_hidden_states(self, aux_hidden_states: Float[Tensor, "N AHt"]) -> Float[Tensor, "N H"]:
        """fc over the captured layers, each normalised by its own norm when `fc_norm`."""
        if self.config.fc_norm:
            chunks = aux_hidden_states.chunk(self.config.num_aux_hidden_states, dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            aux_hidden_states = torch.cat(normed, dim=-1)
        return self.fc(aux_hidden_states)

    def first_step(
        self,
        projected: Float[Tensor, "N H"],
        input_ids: Int[Tensor, "N"],
        position_ids: Int[Tensor, "N"],
        layout: PackedLayout,
        rows: Int[Tensor, "M"] | None = None,
    ) -> tuple[Float[Tensor, "M H"], TttState]:
        """TTT step 0 over packed documents: keys of all slots, queries only at `rows` (ascending; None: all)."""
        normed = self.midlayer.normed_inputs(self.embed_tokens(input_ids), projected)
        cos, sin = self.rotary(position_ids)
        keys, values = self.midlayer.self_attn.keys_values(normed, cos, sin)
        if rows is not None:
            projected, normed = projected.index_select(0, rows), normed.index_select(0, rows)
            position_ids, cos, sin = position_ids[rows], cos[rows], sin[rows]
        state = TttState(layout=layout, rows=rows, position_ids=position_ids, step0_keys=keys, step0_values=values)
        return self._attend(normed, projected, cos, sin, state), state

    def next_step(
        self, hidden: Float[Tensor, "M H"], input_ids: Int[Tensor, "M"], state: TttState
    ) -> Float[Tensor, "M H"]:
        """One further TTT step of the active rows; appends this step's keys and values to `state`.

        `input_ids` are the tokens one position further than at the last step; the rotary position grows by one.
        """
        normed = self.midlayer.normed_inputs(self.embed_tokens(input_ids), hidden)
        cos, sin = self.rotary(state.position_ids + len(state.diagonal_keys) + 1)
        keys, values = self.midlayer.self_attn.keys_values(normed, cos, sin)
        state.diagonal_keys.append(keys)
        state.diagonal_values.append(values)
        return self._attend(normed, hidden, cos, sin, state)

    def _attend(self, normed: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, state: TttState) -> Tensor:
        attended = ttt_attention(
            self.midlayer.self_attn.query(normed, cos, sin),
            state.step0_keys,
            state.step0_values,
            state.diagonal_keys,
            state.diagonal_values,
            state.layout,
            rows=state.rows,
            attention=self.attention,
        )
        return self._recurrent(self.midlayer.finish(attended, residual))

    def _recurrent(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden

    def head_inputs(self, hidden: Float[Tensor, "M H"]) -> Float[Tensor, "M H"]:
        """What lm_head reads: the normalised state (already so with `norm_output`)."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def compute_logits(self, hidden: Float[Tensor, "M H"]) -> Float[Tensor, "M W"]:
        """Draft-vocabulary logits of recurrent states."""
        return self.lm_head(self.head_inputs(hidden))

    def new_cache(self, capacity: int = 256) -> DraftCache:
        """An empty key and value cache for `extend`, growing beyond `capacity` tokens when needed."""
        config, weight = self.config, self.fc.weight
        return DraftCache(
            config.num_key_value_heads, config.head_dim, capacity=capacity, dtype=weight.dtype, device=weight.device
        )

    def extend(
        self,
        features: Float[Tensor, "n H"],
        token_ids: Int[Tensor, "n"],
        positions: Int[Tensor, "n"],
        cache: DraftCache,
    ) -> Float[Tensor, "n H"]:
        """Append n slots to the cache of one sequence and return their recurrent states (batch 1, causal).

        Slot of position t: `features` = projected target features of t, or the draft's own last state; `token_ids` =
        x[t+1]; the logits of the returned state predict x[t+2].
        """
        normed = self.midlayer.normed_inputs(self.embed_tokens(token_ids), features)
        cos, sin = self.rotary(positions)
        keys, values = cache.append(*self.midlayer.self_attn.keys_values(normed, cos, sin))
        attended = cached_attention(self.midlayer.self_attn.query(normed, cos, sin), keys, values)
        return self._recurrent(self.midlayer.finish(attended, features))
