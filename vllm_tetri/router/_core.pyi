"""The router's C++ core: events on their way. Owned by one event loop; nothing in it waits."""

from enum import Enum

class FlowState(Enum):
    OPEN = 0
    FULL = 1  # the client reads too slowly: some bytes are unsent
    KEPT = 2  # many events are kept, and more will be: open, but they should be taken
    ENDED = 3  # the rest is for the caller to read

class Flow:
    """Whole events, each a chunk of an HTTP response, on their way to a client's socket. It ends
    before a chunk that is anything else, and with either connection."""

    state: FlowState
    num_events: int  # that the client got or will get
    last_s: float  # when bytes came last, monotonic; 0: never
    def take_kept(self) -> bytes:
        """The events since the last call, with their ids, if they are kept."""
    def take_unsent(self) -> bytes:
        """The bytes to be written before anything else."""
    def end(self) -> bytes:
        """Return the bytes that were read and are no part of it. Idempotent."""

class Pump:
    """The flows of an event loop, and of one thread."""
    def __init__(self, words: list[bytes]) -> None:
        """A flow ends before a chunk with one of the words."""
    def fileno(self) -> int:
        """A descriptor that is readable when `turn` has something to do."""
    def begin(
        self,
        source: int,
        target: int,
        *,
        keeps: bool,
        hides_ids: bool,
        drops_empty: bool,
        theirs: bytes,
        ours: bytes,
    ) -> Flow:
        """Let events flow between two sockets, which nothing else uses in these directions
        meanwhile; both are duplicated. Raises RuntimeError without descriptors."""
    def turn(self, most: int) -> tuple[int, list[Flow]]:
        """Read of at most so many sockets, without waiting; return how many that were, and the
        flows that stopped, or whose events should be taken."""

def hide_ids(events: bytes, *, with_prompt: bool, drops_empty: bool) -> bytes:
    """Replace token ids in events by null, those of the prompt once if wanted, and leave out the
    events of a chat that hold nothing else if wanted."""
