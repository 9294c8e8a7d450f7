"""vLLM's schedulers without a model, as `real` plays them: ours and the one as it comes.

Answers end where the script says so, by a token that stops them, so that no scheduler can
know their lengths before. There is no prefix cache, which the simulator leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.harness import BLOCK, Engine
from tests.engine.llama import LLAMA
from vllm_tetri.sim.config import ClusterConfig, InstanceConfig, Stock
from vllm_tetri.sim.workload import GRANULARITY_TOKENS, NUM_BUCKETS, RequestSpec
from vllm_tetri.types import Prediction

WINDOW_TOKENS = GRANULARITY_TOKENS * NUM_BUCKETS  # so that there are as many buckets
ARENA_BYTES = 16 << 20
_PAGE = 128  # so that a block takes what an arena rounds to
_WORD, _STOP = 7, 3
_ARGS: dict[str, Any] = {
    "max_model_len": WINDOW_TOKENS,
    "max_num_batched_tokens": WINDOW_TOKENS,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}


def next_token(request: Request, outputs: Mapping[str, int]) -> int:
    """Return the next token of a request whose output has a known length."""
    is_last = request.num_output_tokens + 1 == outputs[request.request_id]
    return _STOP if is_last else _WORD


class TetriEngine(Engine):
    """An engine with this package, as a place of a simulated cluster says.

    Args:
        asks: Every request, by name.
    """

    def __init__(
        self,
        folder: Path,
        setting: ClusterConfig,
        place: InstanceConfig,
        specs: Mapping[str, RequestSpec],
    ) -> None:
        engine = place.engine
        super().__init__(
            folder,
            place.role,
            num_blocks=engine.kv_blocks + 1,  # one is vLLM's null block
            page=_PAGE,
            args={**_ARGS, "max_num_seqs": engine.max_requests},
            instance=place.id,
            chunk_size=engine.chunk_tokens,
            prefill_policy=engine.order,
            sched_batch=engine.sched_batch,
            decode_policy=engine.admission,
            dispatch_policy=setting.dispatch,
            report_period_s=setting.report_period_s,
            arena_bytes=ARENA_BYTES,
        )
        self._lengths = {name: spec.output_tokens for name, spec in specs.items()}

        def predicted(name: str, *, is_due: bool = False) -> Prediction | None:
            return specs[name].predicted if name in specs else None

        self.endpoint.predictions.get = predicted

    def sample(self, request: Request) -> int:
        return next_token(request, self._lengths)

    def enter(self, name: str, tokens: list[int], params: dict[str, Any] | None = None) -> None:
        """A request came."""
        request = self.add(name, tokens, max_tokens=WINDOW_TOKENS, params=params)
        request.sampling_params.stop_token_ids = [_STOP]

    @property
    def is_sending(self) -> bool:
        """Whether KV is on its way to another one."""
        return len(self.endpoint.sends) > 0


class StockEngine:
    """vLLM as it comes, on the same terms."""

    is_sending = False

    def __init__(
        self,
        folder: Path,
        setting: ClusterConfig,
        place: InstanceConfig,
        specs: Mapping[str, RequestSpec],
    ) -> None:
        engine = place.engine
        assert isinstance(engine.kind, Stock)
        budget = engine.kind.budget_tokens
        (folder / "config.json").write_text(json.dumps(LLAMA))
        args = {**_ARGS, "max_num_batched_tokens": budget, "enable_chunked_prefill": True}
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK,
            max_num_seqs=min(engine.max_requests, budget),
            **args,
        ).create_engine_config()
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        config.cache_config.num_gpu_blocks = engine.kv_blocks + 1
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=engine.kv_blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self._lengths = {name: spec.output_tokens for name, spec in specs.items()}

    def enter(self, name: str, tokens: list[int], params: dict[str, Any] | None = None) -> None:
        """A request came."""
        assert params is None
        sampling = SamplingParams(max_tokens=WINDOW_TOKENS, stop_token_ids=[_STOP])
        self.scheduler.add_request(Request(name, tokens, sampling, None))

    def begin(self) -> tuple[Any, KVConnectorOutput]:
        """Put a step together."""
        return self.scheduler.schedule(), KVConnectorOutput()

    def update(self, output: Any, kv_output: KVConnectorOutput) -> None:
        """It is over."""
        ids = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in ids]
        sampled = [
            [next_token(each, self._lengths)] if each.num_computed_tokens >= each.num_tokens else []
            for each in requests
        ]
        places = {name: place for place, name in enumerate(ids)}
        result = ModelRunnerOutput(ids, places, sampled_token_ids=sampled)
        self.scheduler.update_from_output(output, result)

    def close(self) -> None:
        self.scheduler.shutdown()
