"""One file per model family: ``TABLE`` and ``spec_from_hf``. The registry finds all."""
