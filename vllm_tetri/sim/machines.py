"""Which class simulates which kind of engine."""

from __future__ import annotations

from vllm_tetri.sim.engines import Engine, Orca, PromptsFirst, Static, Stock, Tetri, Unchunked
from vllm_tetri.sim.instance import Cluster, Instance
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.orca import OrcaInstance
from vllm_tetri.sim.prompts_first import PromptsFirstInstance
from vllm_tetri.sim.setting import Place
from vllm_tetri.sim.static import StaticInstance
from vllm_tetri.sim.stock import StockInstance
from vllm_tetri.sim.tetri import TetriInstance
from vllm_tetri.sim.unchunked import UnchunkedInstance

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
