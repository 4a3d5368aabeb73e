"""Training on megatron-core, which only this package and trainer_state import."""
