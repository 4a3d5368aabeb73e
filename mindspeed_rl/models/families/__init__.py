"""One module per model family with ``TABLE`` and ``spec_from_hf``; the registry finds them all."""
