"""Which class simulates which kind of engine."""

from __future__ import annotations

from vllm_tetri.sim.engine.instance import Cluster, Instance
from vllm_tetri.sim.engine.kinds import Engine, Orca, PromptsFirst, Static, Stock, Tetri, Unchunked
from vllm_tetri.sim.engine.orca import OrcaInstance
from vllm_tetri.sim.engine.prompts_first import PromptsFirstInstance
from vllm_tetri.sim.engine.static import StaticInstance
from vllm_tetri.sim.engine.stock import StockInstance
from vllm_tetri.sim.engine.tetri import TetriInstance
from vllm_tetri.sim.engine.unchunked import UnchunkedInstance
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.setting import Place

_CLASSES: dict[type[Engine], type[Instance]] = {
    Tetri: TetriInstance,
    Unchunked: UnchunkedInstance,
    Stock: StockInstance,
    PromptsFirst: PromptsFirstInstance,
    Orca: OrcaInstance,
    Static: StaticInstance,
}


def instance_of(place: Place, cluster: Cluster, loop: Loop) -> Instance:
    """The simulated engine of a place."""
    return _CLASSES[type(place.shape.engine)](place, cluster, loop)
