"""Names and shapes of parameters in the trainer and in checkpoints, where the tables' differ.

The tables of the families name parameters after megatron-core's own modules. Transformer Engine's
modules, which MindSpeed replaces one by one on NPUs, and checkpoints of other implementations hold
the same numbers under other names: norms inside the linear layer that follows them, the experts of
a rank in one module or matrix, the two down projections of latent attention in one, and layers of
multi-token prediction, which the trainer does not build.

Sources: MindSpeed-LLM master and 2.1.0, ``mindspeed_llm/tasks/checkpoint``; megatron-core 0.16.1,
``models/gpt/gpt_layer_specs.py`` and ``models/backends.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from mindspeed_rl.models.attention_rules import HeadPart
from mindspeed_rl.models.blocks import EMBED_NAME
from mindspeed_rl.models.expert_rules import PerExpert, StackedExperts
from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.models.rules import Joined, Replicated, Split, Vocab, WeightRow
from mindspeed_rl.models.spec import ModelSpec

_LAYERS, _MTP_LAYERS = "decoder.layers.{l}.", "mtp.layers.{l}.transformer_layer."
_A = "self_attention."
_OLD_NAMES = {
    _A + "linear_q_up_proj.weight": _A + "linear_qb.weight",
    _A + "linear_kv_up_proj.weight": _A + "linear_kvb.weight",
    _A + "kv_layernorm.weight": _A + "k_layernorm.weight",
}
_ONE_EXPERT = "mlp.experts.local_experts.{e}."
_STACKS = {"linear_fc1.weight": "mlp.experts.weight1", "linear_fc2.weight": "mlp.experts.weight2"}
#: HF tensors of a multi-token-prediction layer that repeat tensors of the model.
MTP_COPIES = {"embed_tokens.weight": EMBED_NAME, "shared_head.head.weight": "lm_head.weight"}


@dataclass(frozen=True, slots=True)
class ParamNames:
    """The names that modules or a checkpoint give to parameters.

    Attributes:
        input_norm: Whether the norm before attention is in its projection (Transformer Engine);
            latent attention has such a projection only with ``joined_down``.
        dense_norm: Whether the norm before a dense MLP is in its first linear layer.
        expert_norm: Whether the norm before experts is named as ``dense_norm`` names it, though no
            linear layer follows; megatron-core does so in a distributed checkpoint of its own
            modules.
        latent_norms: Whether norms of compressed query and key/value are in the projections after
            them.
        experts: ``"single"``: one module per expert; ``"stacked"``: MindSpeed's grouped GEMM, all
            experts of a rank in ``weight1`` and ``weight2``, transposed; ``"numbered"``:
            Transformer Engine's, one module with a numbered weight per expert.
        joined_down: Whether the down projections of latent attention are one ``linear_qkv``.
        old_latent: Whether latent attention has the names that MindSpeed-LLM gave it before it took
            megatron-core's.
        split_up: Whether up projections of latent attention are split by kind of channel
            (``--mla-mm-split``).
        mtp: Whether there are layers of multi-token prediction.
    """

    input_norm: bool = False
    dense_norm: bool = False
    expert_norm: bool = False
    latent_norms: bool = False
    experts: str = "single"
    joined_down: bool = False
    old_latent: bool = False
    split_up: bool = False
    mtp: bool = False

    @property
    def fused_norms(self) -> bool:
        """Whether linear layers of Transformer Engine hold the norm before them."""
        return self.dense_norm

    @property
    def grouped_experts(self) -> bool:
        """Whether one module holds all experts of a rank, with one weight per expert."""
        return self.experts == "numbered"

    def param(self, pattern: str, spec: ModelSpec, layer: int) -> str:
        """The name pattern that a row of the table has at a layer of the model."""
        prefix, separator, tail = pattern.partition("{l}.")
        deep = "transformer_layer." if tail.startswith("transformer_layer.") else ""
        tail = tail.removeprefix(deep)
        if self.grouped_experts and tail.startswith(_ONE_EXPERT):
            tail = f"mlp.experts.{tail.removeprefix(_ONE_EXPERT)}{{e}}"
        if self.old_latent and spec.layer(layer).latent_attention:
            tail = _OLD_NAMES.get(tail, tail)
        if not deep:
            tail = self._norm(tail, spec, layer)
        if self.mtp and pattern == "decoder.final_layernorm.weight":
            return "final_layernorm.weight"
        return prefix + separator + deep + tail

    def _norm(self, tail: str, spec: ModelSpec, layer: int) -> str:
        latent = spec.layer(layer).latent_attention
        if tail == "input_layernorm.weight":
            fused = self.input_norm and (self.joined_down or not latent)
            return _A + "linear_qkv.layer_norm_weight" if fused else tail
        if tail == "pre_mlp_layernorm.weight":
            fused = self.expert_norm if spec.layer(layer).moe else self.dense_norm
            return "mlp.linear_fc1.layer_norm_weight" if fused else tail
        if self.latent_norms and latent:
            return _FUSED_LATENT.get(tail, tail)
        return tail

    def rows(self, spec: ModelSpec) -> tuple[WeightRow, ...]:
        """The rows of a checkpoint in this dialect."""
        rows = weight_table(spec.family).trainer_rows(spec)
        if self.mtp:
            rows = (*rows, *_mtp_rows(spec, rows))
        return tuple(changed for row in rows for changed in self._changed(row))

    def _changed(self, row: WeightRow) -> Iterator[WeightRow]:
        prefix, separator, tail = row.param.partition(_A)
        start = prefix + separator
        if self.joined_down and separator and tail == "linear_kv_down_proj.weight":
            assert isinstance(row, Replicated)
            query = row.hf.replace("kv_a_proj_with_mqa", "{q}")
            yield _JoinedDown(
                start + "linear_qkv.weight", stage=row.stage, query=query, key_value=row.hf
            )
        elif self.joined_down and tail in ("linear_q_down_proj.weight", "linear_q_proj.weight"):
            return
        elif self.split_up and tail == "linear_q_up_proj.weight":
            yield from _parts(row, start, ("linear_qk_nope", "linear_qk_rope"), _QUERY)
        elif self.split_up and tail == "linear_kv_up_proj.weight":
            yield from _parts(row, start, ("linear_kv_nope", "linear_v"), _KEY_VALUE)
        elif self.experts == "stacked" and isinstance(row, PerExpert):
            prefix, _, tail = row.param.partition(_ONE_EXPERT)
            yield StackedExperts(
                prefix + _STACKS[tail], stage=row.stage, inner=row.inner, transposed=True
            )
        else:
            yield row


LOCAL = ParamNames()
TRANSFORMER_ENGINE = ParamNames(input_norm=True, dense_norm=True, latent_norms=True)
GROUPED = replace(TRANSFORMER_ENGINE, experts="numbered")

_FUSED_LATENT = {
    _A + "q_layernorm.weight": _A + "linear_q_up_proj.layer_norm_weight",
    _A + "kv_layernorm.weight": _A + "linear_kv_up_proj.layer_norm_weight",
}
_QUERY = ("nope_head_dim", "rope_head_dim")
_KEY_VALUE = ("nope_head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True)
class _JoinedDown(Joined):
    """The query, compressed or not, above the compressed key/value; whole on every rank."""

    query: str = ""
    key_value: str = ""

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        (compressed,) = spec.dims(("q_lora_rank",))
        name, rows = ("q_a_proj", "q_lora_rank") if compressed else ("q_proj", "q_size")
        return {
            self.query.replace("{q}", name): spec.dims((rows, "hidden_size")),
            self.key_value: spec.dims(("kv_a_size", "hidden_size")),
        }


def _parts(
    row: WeightRow, start: str, names: tuple[str, str], sizes: tuple[str, str]
) -> Iterator[WeightRow]:
    assert isinstance(row, Split)
    for part, name in enumerate(names):
        yield HeadPart(
            f"{start}{name}.weight",
            stage=row.stage,
            hf=row.hf,
            dims=row.dims,
            sizes=sizes,
            part=part,
        )


def _mtp_rows(spec: ModelSpec, rows: tuple[WeightRow, ...]) -> Iterator[WeightRow]:
    """Yield the rows of a layer like the model's last one, and of what joins it to the model."""
    head, prefix = "mtp.layers.{l}.", "model.layers.{l}."
    yield Replicated(head + "enorm.weight", stage="mtp", hf=prefix + "enorm.weight")
    yield Replicated(head + "hnorm.weight", stage="mtp", hf=prefix + "hnorm.weight")
    yield Split(
        head + "eh_proj.weight",
        stage="mtp",
        hf=prefix + "eh_proj.weight",
        dims=("hidden_size", "mtp_input_size"),
    )
    for row in rows:
        if row.stage not in ("first", "last") and spec.num_layers - 1 in row.layers(spec):
            param = row.param.replace(_LAYERS, _MTP_LAYERS)
            yield replace(row, param=param, stage="mtp", when="")
    yield Replicated(
        "mtp.final_layernorms.{l}.weight", stage="mtp", hf=prefix + "shared_head.norm.weight"
    )
    # The last of several stages needs the embedding as well.
    yield Vocab("embedding.word_embeddings.weight", stage="last", hf=EMBED_NAME)


def mindspeed_names(
    spec: ModelSpec, *, transformer_engine: bool, grouped: bool, split_up: bool, mtp: bool
) -> ParamNames:
    """The dialect that MindSpeed-LLM writes for a model and its flags."""
    experts = ("numbered" if transformer_engine else "stacked") if grouped else "single"
    return ParamNames(
        input_norm=transformer_engine,
        dense_norm=transformer_engine,
        experts=experts if spec.moe else "single",
        joined_down=spec.latent_attention,
        split_up=split_up,
        mtp=mtp,
    )


def distributed_names(spec: ModelSpec, *, transformer_engine: bool) -> ParamNames:
    """The dialect of megatron-core's distributed format, whose own modules use the fused names."""
    if transformer_engine:
        return TRANSFORMER_ENGINE
    if spec.latent_attention:
        return LOCAL
    return ParamNames(input_norm=True, dense_norm=True, expert_norm=True)


def recognised_from(params: Collection[str], spec: ModelSpec) -> ParamNames:
    """Recognise the dialect of a checkpoint by its parameter names."""

    def ends(tail: str) -> bool:
        return any(name.endswith(tail) for name in params)

    latent = spec.latent_attention
    stacked, numbered = ends("mlp.experts.weight1"), ends("mlp.experts.linear_fc1.weight0")
    dense_norm = ends("mlp.linear_fc1.layer_norm_weight")
    return ParamNames(
        input_norm=ends("linear_qkv.layer_norm_weight"),
        dense_norm=dense_norm,
        expert_norm=dense_norm and not ends("pre_mlp_layernorm.weight"),
        latent_norms=ends("linear_kv_up_proj.layer_norm_weight"),
        experts="stacked" if stacked else "numbered" if numbered else "single",
        joined_down=latent and ends("linear_qkv.weight"),
        old_latent=latent and ends("linear_kvb.weight"),
        split_up=ends("linear_kv_nope.weight"),
        mtp=any(name.startswith("mtp.") for name in params),
    )
