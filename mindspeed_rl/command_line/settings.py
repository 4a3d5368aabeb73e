"""Tells by which numbers a run learns, those that nobody typed included."""

from __future__ import annotations

from mindspeed_rl.config import RLRunConfig

_LARGE_MODEL = 100_000_000  # weights
_OF_ADAPTERS = 10  # times the learning rate of all weights
_LARGE_LR = 1e-5  # published runs of RL with large models are at 1e-6 to 5e-6


def settings_lines(config: RLRunConfig, num_weights: int) -> list[str]:
    """Return learning rate, batch, bounds and KL of a run in a line, and a warning of a high rate.

    A pretraining script leaves flags in force that RL wants otherwise, so they are said at start.

    Args:
        config: Configuration of the run.
        num_weights: Weights of the model.
    """
    train, rl = config.train, config.rl
    weights = f"optimizer: {_learning_rate(config)}, weight decay {train.weight_decay:g}"
    weights += f", betas {train.adam_beta1:g} {train.adam_beta2:g}"
    weights += f", gradients clipped at norm {train.clip_grad:g}" if train.clip_grad else ""
    loss = config.policy_loss.loss
    if config.lora.is_on:
        layers, rank = " ".join(config.lora.lora_target), config.lora.lora_rank
        weights += f"; adapters of rank {rank} and scale {config.lora.scale:g} on {layers}"
    parts = [weights, f"temperature {rl.rl_default_temperature:g}"]
    if "eps_upper" in loss.reads:
        lower, upper = config.surrogate.eps_lower, config.surrogate.eps_upper
        parts.append(f"clip bounds {lower:g} below and {upper:g} above")
    parts.append(_kl(config))
    if weight := config.distillation.sampled_weight:
        parts.append(f"teachers x {weight:g} in the advantages")
    if weight := config.distillation.full_weight:
        parts.append(f"reverse KL to the teachers x {weight:g} in the loss")
    if rl.grpo_entropy_term_weight:
        parts.append(f"entropy bonus {rl.grpo_entropy_term_weight:g}")
    lines = ["; ".join(parts)]
    usual = _LARGE_LR * (_OF_ADAPTERS if config.lora.is_on else 1)
    if train.lr > usual and num_weights > _LARGE_MODEL:
        lines.append(
            f"note: --lr {train.lr:g} is that of a pretraining script rather than of RL; most runs "
            "of RL with models of this size are between 1e-6 and 1e-5"
        )
    return lines


def _learning_rate(config: RLRunConfig) -> str:
    train = config.train
    text = f"learning rate {train.lr:g} {train.lr_decay_style}"
    if train.lr_decay_style != "constant":
        text += f" to {train.min_lr:g}"
    if train.lr_warmup_iters:
        text += f" after {train.lr_warmup_iters} steps of warm-up"
    elif train.lr_warmup_fraction:
        text += f" after a warm-up of {100 * train.lr_warmup_fraction:.3g} % of the steps"
    return text


def _kl(config: RLRunConfig) -> str:
    if not config.rl.grpo_kl_beta:
        return "no KL to a reference"
    where = "reward" if config.kl.rl_kl_in_reward else "loss"
    return f"KL ({config.kl.rl_kl_estimator}) in the {where} x {config.rl.grpo_kl_beta:g}"
