"""Flags of the model and of its parallel layout, in Megatron's spelling."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.flag import flag


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Model.

    The architecture comes from ``--hf-checkpoint``. Architecture flags of a pretraining script,
    those of experts and latent attention included, are accepted and compared with it; a
    contradiction is an error, so that a script cannot train another model than it says.
    """

    hf_checkpoint: str = flag(
        "",
        "Directory with config.json, tokenizer and safetensors weights: architecture, tokenizer "
        "and first weights of the policy. Required.",
    )
    tokenizer_name_or_path: str = flag(
        "",
        "Tokenizer directory; empty takes --hf-checkpoint. Exports get this tokenizer.",
    )
    num_layers: int | None = flag(
        None, "Checked against the model's num_hidden_layers, after --noop-layers are taken off."
    )
    noop_layers: str = flag(
        "",
        "Numbers of empty layers that a MindSpeed script pads --num-layers with, like 94,95. They "
        "take a slot in the even split over pipeline stages and nothing else: none is built.",
    )
    hidden_size: int | None = flag(None, "Checked against the model's hidden_size.")
    ffn_hidden_size: int | None = flag(None, "Checked against the model's intermediate_size.")
    num_attention_heads: int | None = flag(None, "Checked against the model's num_attention_heads.")
    group_query_attention: bool = flag(False, "Accepted; the model's config decides.", inert=True)
    num_query_groups: int | None = flag(None, "Checked against the model's num_key_value_heads.")
    kv_channels: int | None = flag(None, "Checked against the model's head_dim.")
    vocab_size: int | None = flag(None, "Checked against the model's vocab_size.")
    padded_vocab_size: int | None = flag(None, "Checked against the vocabulary after padding.")
    make_vocab_size_divisible_by: int = flag(
        128,
        "The vocabulary is padded to a multiple of this times the tensor-parallel size.",
        minimum=1,
    )
    max_position_embeddings: int | None = flag(
        None,
        "Accepted; the model's max_position_embeddings bounds the sequences of a run.",
        inert=True,
    )
    position_embedding_type: str = flag(
        "rope", "Position embedding of the model.", choices=("rope",)
    )
    rotary_base: float | None = flag(None, "Checked against the model's rope_theta.")
    normalization: str = flag("RMSNorm", "Norm of every layer.", choices=("RMSNorm",))
    norm_epsilon: float | None = flag(
        None,
        "Checked against the model's rms_norm_eps.",
        names=("--norm-epsilon", "--layernorm-epsilon"),
    )
    swiglu: bool = flag(False, "Accepted; the model's config decides.", inert=True)
    untie_embeddings_and_output_weights: bool = flag(
        False, "When given, the model must have untied embeddings."
    )
    add_qkv_bias: bool = flag(False, "When given, the model must have q/k/v biases.")
    disable_bias_linear: bool = flag(False, "Accepted; the model's config decides.", inert=True)
    transformer_impl: str = flag(
        "auto",
        "Modules of the trainer's layers. transformer_engine: Transformer Engine's on CUDA, "
        "MindSpeed's in their place on NPU, wherever they are installed; local: megatron-core's "
        "own; auto: transformer_engine where it is installed, on CUDA with grouped experts. A CPU "
        "has local ones only.",
        choices=("auto", "local", "transformer_engine"),
    )
    moe_grouped_gemm: bool = flag(
        False,
        "Compute the experts of a rank in one grouped GEMM; needs the modules of "
        "--transformer-impl transformer_engine, elsewhere experts are computed one by one. On CUDA "
        "--transformer-impl auto does so without this flag.",
    )
    attention_dropout: float = flag(
        0.0, "Dropout of attention probabilities; RL allows 0 only.", minimum=0.0, below=1.0
    )
    hidden_dropout: float = flag(
        0.0, "Dropout of the residual stream; RL allows 0 only.", minimum=0.0, below=1.0
    )

    @property
    def tokenizer_directory(self) -> str:
        return self.tokenizer_name_or_path or self.hf_checkpoint


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Training layout.

    World size = tensor x pipeline x context x data parallelism. The world is what torchrun starts
    (nnodes x nproc-per-node); data parallelism is not a flag but what remains of it. Tensor
    parallel ranks are neighbours, pipeline stages furthest apart. Rollouts have a layout of their
    own: see --rollout-tp.

    Example, 16 ranks: --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 leaves data
    parallelism 16 / (4 x 2) = 2, so every batch size must be a multiple of 2.
    """

    tensor_model_parallel_size: int = flag(
        1,
        "Ranks that share each layer in training; must divide the query heads, and divide or be a "
        "multiple of the key/value heads.",
        minimum=1,
    )
    pipeline_model_parallel_size: int = flag(
        1,
        "Pipeline stages of training; must divide the layers (with --noop-layers), unless "
        "--num-layer-list says otherwise.",
        minimum=1,
    )
    num_layer_list: str = flag(
        "",
        "Layers of each pipeline stage, like 7,8,8,7; with a multiple of the stages the numbers "
        "are chunks of an interleaved pipeline in the order of the model.",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "Layers of the first pipeline stage; the others share the rest.", minimum=0
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "Layers of the last pipeline stage; the others share the rest.", minimum=0
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False,
        "Count the embedding as one more layer in the even split over pipeline stages: the first "
        "stage has a layer less.",
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False,
        "Count the output layer and loss as one more layer in the even split over pipeline "
        "stages: the last stage has a layer less.",
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Layers of each chunk of an interleaved pipeline.", minimum=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "Chunks of each stage of an interleaved pipeline.", minimum=1
    )
    context_parallel_size: int = flag(
        1,
        "Ranks that share each sequence in training: each takes two of twice as many chunks.",
        minimum=1,
    )
    sequence_parallel: bool = flag(
        False,
        "Shard activations along the sequence within a tensor-parallel group; without effect where "
        "--tensor-model-parallel-size is 1.",
    )
    expert_model_parallel_size: int = flag(
        1, "Ranks that share the experts in training; must divide the experts.", minimum=1
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "Ranks that share each expert in training; unset takes the tensor-parallel size.",
        minimum=1,
    )
    moe_tp_extend_ep: bool = flag(
        False,
        "MindSpeed's switch: tensor-parallel ranks extend expert parallelism, so that experts are "
        "whole: the same as --expert-tensor-parallel-size 1 with an expert parallelism of "
        "--expert-model-parallel-size x --tensor-model-parallel-size.",
    )
    use_distributed_optimizer: bool = flag(
        False, "Shard optimizer state and master weights over data parallelism."
    )
    distributed_timeout_minutes: int = flag(60, "Limit of one collective, in minutes.", minimum=1)
    platform: str = flag(
        "auto",
        "Device platform; auto takes an NPU or CUDA where torch sees one, else CPU.",
        choices=("auto", "cpu", "cuda", "npu"),
    )

    @property
    def shards_sequence(self) -> bool:
        """Whether sequence parallelism is on; with one tensor-parallel rank it is a no-op."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def idle_flags(self) -> tuple[str, ...]:
        """Flags that were given and have no effect together with the other flags."""
        idle = self.sequence_parallel and not self.shards_sequence
        return ("--sequence-parallel (needs --tensor-model-parallel-size above 1)",) * idle
