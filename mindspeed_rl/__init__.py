"""mindspeed_rl: RL post-training for Megatron and MindSpeed users."""

__version__ = "0.1.0"
