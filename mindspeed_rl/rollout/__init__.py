"""What a run asks of an inference engine inside its processes, whichever it is."""
