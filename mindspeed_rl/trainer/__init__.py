"""Training on megatron-core, which only this package, trainer_state and adapters import."""
