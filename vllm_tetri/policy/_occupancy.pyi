"""What a decode batch will hold, in C++: `Admission` asks it for every request and step.

A request of the batch is a pair: tokens whose KV it holds, and tokens that it will write
on top, one per step. Behind the last one it gives all its blocks back.
"""

class Occupancy:
    """A batch as it was when a step began, and who was added since.

    Args:
        block_size: Tokens per block, at least 1.
        batch: Pairs of tokens held and tokens to come.

    Raises:
        ValueError: A block without tokens, or less than no tokens, here or in `add` or `fits`.
        TypeError: Something in `batch` is no pair of whole numbers.
    """

    def __init__(self, block_size: int, batch: list[tuple[int, int]]) -> None: ...
    def __len__(self) -> int: ...
    def add(self, tokens: int, rest: int) -> None: ...
    @property
    def held_blocks(self) -> int:
        """Now, as if no block were shared."""

    @property
    def growth_blocks(self) -> int:
        """What all of them will take on top if nothing comes back."""

    @property
    def most_growth_blocks(self) -> int:
        """What they hold on top at the end at which most is held; 0 if that is less."""

    def fits(self, tokens: int, rest: int, limit_blocks: int) -> bool:
        """Whether with one more request no more than `limit_blocks` are held just before
        any end that it lives to see, its own included."""
