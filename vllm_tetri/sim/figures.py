"""Figures of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cluster import RefusedRequest
from vllm_tetri.sim.request import SimRequest


def figures(
    served: Sequence[SimRequest], slo: Objective, refused: Sequence[RefusedRequest] = ()
) -> dict[str, float]:
    """Sum up requests, by name: `itl` are times between two tokens of all outputs; `good` is the
    share within the SLOs, and `good_per_s` those per second from the first arrival to the last
    token; `split` is the share that two instances served, and `cached` the part of their prompts
    that prefix caches had. Times are of requests that were not refused, nan if there are none."""
    count = len(served) + len(refused)
    ttft, jct, tpot = (
        np.array([getattr(each, name) for each in served] or [np.nan])
        for name in ("ttft_s", "jct_s", "tpot_s")
    )
    specs = [each.spec for each in served] + [each.spec for each in refused]
    good = float(((ttft <= slo.ttft_s) & (tpot <= slo.tpot_s)).sum())
    first_s = min(spec.arrival_s for spec in specs)
    end_s = max((each.spec.arrival_s + each.jct_s for each in served), default=np.inf)
    itl_p50, itl_p99, itl_max = gap_quantiles(served, (0.5, 0.99, 1.0))
    return {
        "requests": count,
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p50_s": float(np.quantile(ttft, 0.5)),
        "ttft_p99_s": float(np.quantile(ttft, 0.99)),
        "itl_p50_s": itl_p50,
        "itl_p99_s": itl_p99,
        "itl_max_s": itl_max,
        "tpot_mean_s": float(tpot.mean()),
        "jct_mean_s": float(jct.mean()),
        "jct_p99_s": float(np.quantile(jct, 0.99)),
        "good": good / count,
        "good_per_s": good / (end_s - first_s),
        "split": sum(each.is_split for each in served) / max(1, len(served)),
        "refused": len(refused),
        "fetched": sum(each.fetched_tokens for each in served)
        / max(1, sum(each.spec.prompt_tokens for each in served)),
        "cached": sum(each.cached_tokens for each in served)
        / max(1, sum(each.spec.prompt_tokens for each in served)),
    }


def gap_quantiles(served: Iterable[SimRequest], parts: Sequence[float]) -> list[float]:
    """Quantiles of all times between two tokens; 0 where no output has two tokens."""
    gaps = [part for each in served for part in each.gap_parts]
    return np.quantile(np.concatenate(gaps), parts).tolist() if gaps else [0.0] * len(parts)
