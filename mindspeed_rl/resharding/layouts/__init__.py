"""Who holds which rectangle of which Hugging Face tensor: trainer, engine, files."""
