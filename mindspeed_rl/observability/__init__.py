"""What a run tells: metrics with their reductions, times, logs, sampled rollouts, curves.

Import from the modules: ``files``, ``jsonl``, ``summary`` and ``curves`` then stay free of torch.
"""
