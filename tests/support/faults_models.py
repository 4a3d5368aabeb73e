"""Named faults of model families and context parallelism."""

from __future__ import annotations

from support.mutation import Mutation

_CONTEXT = "tests/unit/test_context_split.py::"
_ROPE = "tests/unit/test_rope.py::"

MODEL_MUTATIONS = (
    Mutation(
        "context-chunks-not-zigzag",
        "data/packing.py",
        "for position in (rank, 2 * cp - 1 - rank):",
        "for position in (2 * rank, 2 * rank + 1):",
        _CONTEXT + "test_ranks_have_equal_attention_work",
    ),
    Mutation(
        "context-mask-off-by-one",
        "trainer/packed_attention.py",
        "mask = (j[:, None] <= last[..., None])[:, None]",
        "mask = (j[:, None] <= last[..., None] + 1)[:, None]",
        _CONTEXT + "test_attention_of_all_ranks_is_that_of_the_row",
    ),
    Mutation(
        "trained-tokens-of-another-share",
        "data/packing.py",
        "trained = (batch.loss_mask.cumsum(0) - 1)[index][mask]",
        "trained = (batch.loss_mask.cumsum(0) - 1)[: index.numel()][mask]",
        _CONTEXT + "test_ranks_share_every_token_once",
    ),
    Mutation(
        "llama3-frequencies-not-blended",
        "models/rope.py",
        "keep = min(1.0, max(0.0, keep))",
        "keep = float(keep > 0.5)",
        _ROPE + "test_frequencies_are_those_of_transformers",
    ),
    Mutation(
        "yarn-attention-factor-ignored",
        "models/rope.py",
        "        attention_factor=float(attention),\n",
        "",
        _ROPE + "test_frequencies_are_those_of_transformers",
    ),
    Mutation(
        "positions-beyond-yarn-in-the-engine",
        "models/spec.py",
        "return min(self.max_position_embeddings, stretched)",
        "return self.max_position_embeddings",
        _ROPE + "test_an_engine_knows_the_positions_of_yarns_stretched_context",
    ),
    Mutation(
        "rollouts-beyond-yarn",
        "config/validate.py",
        "if limit > spec.engine_positions:",
        "if limit > spec.max_position_embeddings:",
        "tests/unit/test_config_validate.py::"
        "test_rollouts_stay_within_what_the_engine_knows_of_yarn",
    ),
    Mutation(
        "untruncated-yarn-of-latent-attention",
        "models/families/deepseek_v3.py",
        'if kind == "yarn" and not scaling.get("truncate", True):',
        "if False:",
        "tests/unit/test_published_models.py::test_what_is_not_computed_is_refused",
    ),
    Mutation(
        "heads-without-kernels",
        "rollout/vllm_versions.py",
        "if known and size not in known:",
        "if False:",
        "tests/unit/test_vllm_engine.py::test_a_model_without_kernels_of_the_engine_is_refused",
    ),
    Mutation(
        "tokens-scored-twice-unnoticed",
        "score.py",
        "times[sequence, position] += 1",
        "times[sequence, position] = 1",
        "tests/unit/test_score.py::test_every_token_is_scored_once[twice]",
    ),
    Mutation(
        "padding-compared",
        "data/scores.py",
        "scored = (position >= 1) & (position < a.length[:, None])",
        "scored = position < a.length[:, None]",
        "tests/unit/test_score.py::test_what_is_not_scored_is_not_compared",
    ),
    Mutation(
        "built-norms-not-looked-at",
        "trainer/built_check.py",
        'if (eps := getattr(module, "eps", None)) is not None:',
        'if (eps := getattr(module, "epsilon", None)) is not None:',
        "tests/distributed/test_built_check.py::test_whatever_was_built_otherwise_is_named[qwen3-moe]",
    ),
    Mutation(
        "whole-weights-count-as-shards",
        "trainer/model.py",
        "weight.tensor_model_parallel = False",
        "weight.tensor_model_parallel = True",
        "tests/distributed/test_transformer_engine.py::test_norms_count_every_parameter_once[tp2]",
    ),
)
