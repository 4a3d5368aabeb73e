"""Which tokens of a draft are kept: those that are sampled in any case, up to the first other one.

A step of an engine has one row for each drafted token of a request and one more; the rows of a
request follow each other.
"""

from __future__ import annotations

import torch


def grid_of_rows(counts: torch.Tensor) -> torch.Tensor:
    """Return the row of each request and place: [requests, most rows] int64.

    Args:
        counts: [requests] int64, rows of each request, which follow each other.

    Returns:
        Places beyond the rows of a request have the last row of the batch, or one of another
        request: they are not to be used.
    """
    starts = counts.cumsum(0) - counts
    places = torch.arange(int(counts.max()), device=counts.device)
    return (starts[:, None] + places).clamp_(max=int(counts.sum()) - 1)


def kept_places(sampled: torch.Tensor, drafted: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the places whose token is kept: [requests, most rows] bool.

    The first always is; each further one is where all drafts before it were sampled.

    Args:
        sampled: [requests, most rows] int32 or int64, the token that is sampled at each place.
        drafted: [requests, most rows - 1] of the same type, the token that was drafted for it.
        counts: [requests] int64, rows of each request.
    """
    places = torch.arange(1, sampled.shape[1], device=sampled.device)
    differs = sampled[:, :-1] != drafted.masked_fill(places >= counts[:, None], -1)
    first = torch.ones_like(sampled[:, :1], dtype=torch.bool)
    # Sums of int32 have a kernel on every device; products of truth values have none on NPUs.
    return torch.cat([first, differs.to(torch.int32).cumsum(1, dtype=torch.int32) == 0], dim=1)
