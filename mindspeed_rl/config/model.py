"""Flags of the model and of its parallel layout, in Megatron's spelling."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.context_parallelism import CP_ALGORITHMS, CP_KINDS
from mindspeed_rl.core.flag import Needs, flag


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
        "and first weights of the policy; or the name of a model on the hub, ORG/NAME or "
        "ORG/NAME@REVISION. Required.",
    )
    tokenizer_name_or_path: str = flag(
        "",
        "Tokenizer directory; empty takes --hf-checkpoint. Exports get this tokenizer.",
    )
    trust_remote_code: bool = flag(
        False,
        "Execute the Python code in the directories of the model and of the tokenizer (auto_map). "
        "Without it a tokenizer that needs such code is refused, and nothing in these "
        "directories is executed. The code runs with all rights of the run: read it before.",
    )
    num_layers: int | None = flag(
        None,
        "Checked against the model's num_hidden_layers, after --noop-layers are taken off.",
        compared=True,
    )
    noop_layers: str = flag(
        "",
        "Numbers of empty layers that a MindSpeed script pads --num-layers with, like 94,95. They "
        "take a slot in the even split over pipeline stages and nothing else: none is built.",
    )
    hidden_size: int | None = flag(None, "Checked against the model's hidden_size.", compared=True)
    ffn_hidden_size: int | None = flag(
        None, "Checked against the model's intermediate_size.", compared=True
    )
    num_attention_heads: int | None = flag(
        None, "Checked against the model's num_attention_heads.", compared=True
    )
    group_query_attention: bool = flag(
        False, "Agrees with every model; --num-query-groups is checked.", compared=True
    )
    num_query_groups: int | None = flag(
        None, "Checked against the model's num_key_value_heads.", compared=True
    )
    kv_channels: int | None = flag(None, "Checked against the model's head_dim.", compared=True)
    vocab_size: int | None = flag(None, "Checked against the model's vocab_size.", compared=True)
    padded_vocab_size: int | None = flag(
        None, "Checked against the vocabulary after padding.", compared=True
    )
    make_vocab_size_divisible_by: int = flag(
        128,
        "The vocabulary is padded to a multiple of this times the tensor-parallel size.",
        minimum=1,
    )
    max_position_embeddings: int | None = flag(
        None,
        "The model's max_position_embeddings bounds the sequences of a run; the start tells when "
        "this is more.",
        compared=True,
    )
    position_embedding_type: str = flag(
        "rope", "Position embedding of the model.", choices=("rope",), compared=True
    )
    rotary_base: float | None = flag(None, "Checked against the model's rope_theta.", compared=True)
    normalization: str = flag(
        "RMSNorm", "Norm of every layer.", choices=("RMSNorm",), compared=True
    )
    norm_epsilon: float | None = flag(
        None,
        "Checked against the model's rms_norm_eps.",
        names=("--norm-epsilon", "--layernorm-epsilon"),
        compared=True,
    )
    swiglu: bool = flag(
        False, "Agrees with every supported model; others are refused.", compared=True
    )
    untie_embeddings_and_output_weights: bool = flag(
        False, "When given, the model must have untied embeddings.", compared=True
    )
    add_qkv_bias: bool = flag(False, "When given, the model must have q/k/v biases.", compared=True)
    disable_bias_linear: bool = flag(
        False, "Agrees with every supported model; others are refused.", compared=True
    )
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
    cp_comm_type: tuple[str, ...] = flag(
        (),
        "How context-parallel ranks attend together. all_gather: each gathers the keys and values "
        "of whole sequences; p2p: keys and values travel around a ring, and no rank has them all; "
        "a2a: ranks exchange tokens for heads (Ulysses), whose number they must divide; a2a+p2p: "
        "both. All give the same numbers, up to the order of sums. Unset is all_gather: one "
        "collective in each direction, no merging of parts, and cheapest where a rank has few "
        "heads of keys. Sequences whose keys do not fit want p2p; many heads of keys want a2a.",
        choices=CP_KINDS,
        nargs="+",
    )
    context_parallel_algo: str = flag(
        "",
        "MindSpeed's name for --cp-comm-type: kvallgather_cp_algo is all_gather, megatron_cp_algo "
        "p2p, ulysses_cp_algo a2a, hybrid_cp_algo a2a+p2p; adaptive_cp_algo is computed as p2p and "
        "hybrid_adaptive_cp_algo as a2a+p2p.",
        choices=tuple(CP_ALGORITHMS),
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = flag(
        (),
        "Two sizes of a2a+p2p, whose product is --context-parallel-size: neighbouring ranks that "
        "exchange tokens for heads, and ranks of a ring. A node's fast links want the first.",
        nargs="+",
        minimum=1,
    )
    ulysses_degree_in_cp: int | None = flag(
        None,
        "MindSpeed's switch for a2a+p2p: how many neighbouring ranks exchange tokens for heads; "
        "must divide --context-parallel-size.",
        minimum=1,
    )
    hybrid_context_parallel: bool = flag(
        False,
        "Let a micro-batch have several rows, each shared by as many of its context-parallel ranks "
        "as the length of its sequences needs: a row of short ones is on a single rank, which "
        "exchanges no keys and values. The plan gives ranks equal work. Gradients are those of the "
        "same run without it, but for rounding. Without effect where --context-parallel-size is 1.",
    )
    max_seqlen_per_dp_cp_rank: int | None = flag(
        None,
        "Tokens that a context-parallel rank has room for in one micro-batch: a sequence goes to "
        "the fewest ranks that together have room for it. Unset divides "
        "--max-tokens-per-micro-batch, or what it stands for, by --context-parallel-size; given, "
        "it takes the place of --max-tokens-per-micro-batch.",
        minimum=1,
        needs=Needs("--hybrid-context-parallel"),
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
    bind_cores: str = flag(
        "auto",
        "Cores of each rank: its part of those near its device, or of its NUMA node (numa), or all "
        "(none); auto is numa on NPUs. Reward workers run on all. The start of a run says what was "
        "done; no rank is bound where one would have fewer than 4 cores, or where "
        "CPU_AFFINITY_CONF lets torch_npu do it.",
        choices=("auto", "numa", "none"),
    )

    @property
    def shards_sequence(self) -> bool:
        """Whether sequence parallelism is on; with one tensor-parallel rank it is a no-op."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def idle_flags(self) -> tuple[str, ...]:
        """Flags that were given and have no effect together with the other flags."""
        algorithm = self.context_parallel_algo
        instead = algorithm.replace("hybrid_adaptive", "hybrid").replace("adaptive", "megatron")
        idle = {
            "--sequence-parallel (needs --tensor-model-parallel-size above 1)": (
                self.sequence_parallel and not self.shards_sequence
            ),
            "--hybrid-context-parallel (needs --context-parallel-size above 1)": (
                self.hybrid_context_parallel and self.context_parallel_size == 1
            ),
            f"--context-parallel-algo {algorithm} (computed as {instead})": algorithm != instead,
        }
        return tuple(flag for flag, is_idle in idle.items() if is_idle)
